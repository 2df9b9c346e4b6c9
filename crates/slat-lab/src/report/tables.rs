//! The tables of a report: what they say, whoever prints them.
//!
//! One rule serves all of them: a parameter that every row has in common is said once, above the
//! table; one that differs is a column.

pub mod counts;
pub mod engine;
pub mod formats;
pub mod guest;
pub mod kvm;
pub mod limit;
pub mod peers;
pub mod replay;
pub mod split;
pub mod stalls;

use crate::param::{heading, rank, shown};
use crate::record::Measurement;
use crate::table::Table;
use serde_json::{Map, Value};

/// All tables that the results fill, in the order a reader wants them: what guests on this host
/// pay, what the engine does, what the machine allows.
pub fn all(results: &[Measurement]) -> Vec<Table> {
    let guests = stalls::live(results).into_iter().chain(stalls::stalls(results));
    let guests = guests.chain(kvm::phases(results)).chain(stalls::touches(results));
    let tables = [
        split::times(results),
        split::slots(results),
        limit::table(results),
        engine::asked(results),
        engine::times(results),
        formats::table(results),
        guest::asked(results),
        peers::histories(results),
        peers::counts(results),
        engine::asked_of_peers(results),
        peers::ratios(results),
    ];
    let claims = replay::claims(results);
    let of_engine: Vec<_> = results.iter().filter(|m| m.target != "kvm").cloned().collect();
    let engine = tables.into_iter().flatten().chain(guest::figures(&of_engine));
    claims.into_iter().chain(guests).chain(engine).collect()
}

/// Measurements that differ only in their variant (or in what `ignoring` names): one row.
pub struct Row<'a> {
    /// The parameters they share.
    pub params: Map<String, Value>,
    /// They themselves, in the order they were measured in.
    pub measurements: Vec<&'a Measurement>,
}

impl<'a> Row<'a> {
    /// The measurement of one variant.
    pub fn variant(&self, variant: &str) -> Option<&'a Measurement> {
        self.measurements.iter().find(|m| m.variant == variant).copied()
    }

    /// A parameter as text, if it is there.
    pub fn param(&self, name: &str) -> Option<&str> {
        self.params.get(name)?.as_str()
    }
}

/// Gathers one scenario's measurements into rows, in the order of their first appearance.
pub fn rows<'a>(results: &'a [Measurement], scenario: &str, ignoring: &[&str]) -> Vec<Row<'a>> {
    let mut rows: Vec<Row> = Vec::new();
    for measurement in results.iter().filter(|m| m.scenario == scenario) {
        let mut params = measurement.params.clone();
        params.retain(|name, _| !ignoring.contains(&name.as_str()));
        match rows.iter_mut().find(|row| row.params == params) {
            Some(row) => row.measurements.push(measurement),
            None => rows.push(Row { params, measurements: vec![measurement] }),
        }
    }
    rows
}

/// The parameters of some rows, parted into those that are equal in all and those that are not.
pub struct Labels {
    /// What is said once, above the table.
    pub common: String,
    /// Names of the parameters that differ.
    pub differing: Vec<String>,
}

impl Labels {
    /// Parts the parameters of `rows`.
    pub fn of(rows: &[Row]) -> Self {
        let mut names: Vec<&String> = rows.iter().flat_map(|row| row.params.keys()).collect();
        names.sort_by_key(|name| (rank(name), name.as_str()));
        names.dedup();
        let first = |name: &str| rows.first().and_then(|row| row.params.get(name));
        let (common, differing): (Vec<_>, Vec<_>) = names
            .into_iter()
            .partition(|name| rows.iter().all(|row| row.params.get(*name) == first(name)));
        let common: Vec<_> = common
            .into_iter()
            .map(|name| format!("{} {}", heading(name), shown(name, first(name))))
            .collect();
        Self { common: common.join(", "), differing: differing.into_iter().cloned().collect() }
    }

    /// The headings of the label columns.
    pub fn headings(&self) -> impl Iterator<Item = String> + '_ {
        self.differing.iter().map(|name| heading(name))
    }

    /// The label cells of one row.
    pub fn cells(&self, row: &Row) -> Vec<String> {
        self.differing.iter().map(|name| shown(name, row.params.get(name))).collect()
    }
}

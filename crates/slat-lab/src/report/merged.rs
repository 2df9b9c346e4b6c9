//! The measurements of many hosts in one table: a row for each setting on each host.

use super::tables;
use crate::merge::HostReport;
use crate::merge::files::UnmergedFile;
use crate::record::Measurement;
use crate::stats::Summary;
use crate::table::Table;
use serde_json::{Value, json};

const MANY_HOSTS: &str =
    "table.json has how many samples. Times of different hosts are those of different machines.";

/// Returns tables of the hosts, of their measurements, and of what is missing.
pub fn tables(hosts: &[HostReport], bad: &[UnmergedFile], failed: &[UnmergedFile]) -> Vec<Table> {
    let mut all = vec![hosts_table(hosts)];
    all.extend(tables::plain(&named(hosts)).into_iter().map(|mut table| {
        table.notes.push(MANY_HOSTS.to_owned());
        table
    }));
    all.extend(left("Cells that failed", failed));
    all.extend(left("Files that are no report", bad));
    all
}

fn hosts_table(hosts: &[HostReport]) -> Table {
    let row = |host: &HostReport| {
        let report = &host.report;
        vec![
            host.name.clone(),
            report.host.cpu.model.to_string(),
            report.host.cpu.usable.to_string(),
            report.host.kernel.release.to_string(),
            report.tool.to_string(),
            host.files.len().to_string(),
        ]
    };
    let differs = hosts.iter().filter(|host| !host.differs.is_empty()).map(|host| {
        format!("{} is not the first host of that name: {}.", host.name, host.differs.join("; "))
    });
    let noisy = hosts.iter().filter(|host| host.report.is_noisy());
    let trust = noisy.filter_map(|host| Some((&host.name, host.report.trust.as_ref()?)));
    let notes = trust.map(|(name, trust)| format!("{name}: {}", trust.line())).chain(differs);
    Table {
        title: "Hosts".to_owned(),
        common: String::new(),
        columns: ["host", "CPU", "CPUs", "kernel", "slat", "reports"].map(str::to_owned).into(),
        labels: 2,
        rows: hosts.iter().map(row).collect(),
        notes: notes.collect(),
    }
}

/// Returns all measurements, with the host as a parameter, and those of one thing next to each
/// other. Measurements that were made of others, and those of single vCPUs, stay in each host's
/// report.
fn named(hosts: &[HostReport]) -> Vec<Measurement> {
    let mut all: Vec<(&Measurement, Vec<Measurement>)> = Vec::new();
    for host in hosts {
        let whole = |m: &&Measurement| !m.is_derived() && !m.is_vcpu();
        for m in host.report.results.iter().filter(whole) {
            let mut one = m.clone();
            let _ = one.params.insert("host".to_owned(), host.name.clone().into());
            let same = |(first, _): &&mut (&Measurement, Vec<Measurement>)| {
                (&first.scenario, &first.target, &first.variant, &first.unit, &first.params)
                    == (&m.scenario, &m.target, &m.variant, &m.unit, &m.params)
            };
            match all.iter_mut().find(same) {
                Some((_, list)) => list.push(one),
                None => all.push((m, vec![one])),
            }
        }
    }
    all.into_iter().flat_map(|(_, list)| list).collect()
}

fn left(title: &str, files: &[UnmergedFile]) -> Option<Table> {
    let row = |left: &UnmergedFile| vec![left.file.display().to_string(), left.reason.clone()];
    (!files.is_empty()).then(|| Table {
        title: title.to_owned(),
        common: String::new(),
        columns: ["file", "why"].map(str::to_owned).into(),
        labels: 2,
        rows: files.iter().map(row).collect(),
        notes: Vec::new(),
    })
}

/// Returns the same for programs.
pub fn value_of(hosts: &[HostReport], bad: &[UnmergedFile], failed: &[UnmergedFile]) -> Value {
    let rows = named(hosts).into_iter().filter_map(|mut m| {
        let summary = Summary::of(&m.samples)?;
        Some(json!({
            "host": m.params.remove("host"),
            "scenario": m.scenario, "target": m.target, "variant": m.variant, "params": m.params,
            "unit": m.unit, "samples": summary.count, "median": summary.median,
            "min": summary.min, "lower_quartile": summary.lower_quartile,
            "upper_quartile": summary.upper_quartile, "max": summary.max, "counts": m.counts,
        }))
    });
    let host = |host: &HostReport| {
        json!({
            "name": host.name, "differs": host.differs, "files": host.files,
            "slat": host.report.tool, "cpu": host.report.host.cpu.model,
            "kernel": host.report.host.kernel.release, "partial": host.report.partial,
            "trust": host.report.trust,
        })
    };
    json!({
        "hosts": hosts.iter().map(host).collect::<Vec<_>>(),
        "rows": rows.collect::<Vec<_>>(),
        "failed": failed,
        "bad": bad,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake;
    use crate::host::Maybe;
    use crate::report::text;

    #[test]
    fn a_row_is_a_setting_on_a_host() {
        let report = |host: &str, scale: f64| {
            let mut report = fake::report();
            report.host.name = Maybe(Some(host.to_owned()));
            report.results.retain(|m| m.scenario == "split" || m.scenario == "limit");
            report.results.retain(|m| m.params.get("backing").is_none_or(|size| size != "4k"));
            for m in &mut report.results {
                m.samples.iter_mut().for_each(|sample| *sample *= scale);
            }
            (std::path::PathBuf::from(host), report)
        };
        let hosts = crate::merge::merge(vec![report("one", 1.0), report("two", 2.0)], false, &[]);
        let failed =
            [UnmergedFile { file: "cell-007.failed.json".into(), reason: "no memory".to_owned() }];
        let mut shown = String::new();
        for table in tables(&hosts, &[], &failed) {
            text::grid(&mut shown, &table, 140);
        }
        insta::assert_snapshot!(shown);
        let value = value_of(&hosts, &[], &failed);
        assert_eq!(value["hosts"][1]["name"], "two");
        assert_eq!(value["rows"][0]["host"], "one");
        assert_eq!(value["rows"][1]["host"], "two");
        assert_eq!(value["rows"][0]["params"], value["rows"][1]["params"]);
    }
}

//! What each policy loses, computed and compared with the documentation.

use crate::model::{Machine, Mood};
use crate::scenarios::Scenario;
use crate::vm::{Cpu, Manners, config, with_guest};
use slat_guest::CachePolicy;
use std::fmt::Write;

/// Returns whether nothing is lost, whatever the caches do; and the bytes that are maintained on a
/// machine that fetches and writes back nothing by itself.
pub fn cell(policy: CachePolicy, manners: Manners, scenario: Scenario) -> (bool, u64) {
    let mut bytes = None;
    let right = Mood::all().all(|mood| {
        let machine = Machine::new(mood, false);
        let result = with_guest(&machine, config(policy), false, |guest| {
            let cpus = [
                Cpu::new(guest, 0, manners),
                Cpu::new(guest, 1, manners),
                Cpu::new(guest, 2, manners),
            ];
            scenario.run(cpus, &machine)
        });
        bytes.get_or_insert(machine.maintained());
        result.is_ok()
    });
    (right, bytes.unwrap_or(0))
}

fn name(policy: CachePolicy) -> &'static str {
    match policy {
        CachePolicy::Every => "`Every`",
        CachePolicy::Vcpu0 => "`Vcpu0`",
        CachePolicy::First => "`First`",
        CachePolicy::Exact => "`Exact`",
    }
}

fn computed() -> String {
    let mut table = String::from("| policy | the guest |");
    Scenario::ALL.iter().for_each(|scenario| write!(table, " {} |", scenario.name()).unwrap());
    table.push_str("\n|---|---|");
    table.push_str(&"---|".repeat(Scenario::ALL.len()));
    for &policy in CachePolicy::ALL {
        for manners in Manners::ALL {
            let who = match manners {
                Manners::Cleans => "cleans",
                Manners::Relies => "relies",
            };
            write!(table, "\n| {} | {who} |", name(policy)).unwrap();
            for scenario in Scenario::ALL {
                let right = cell(policy, manners, scenario).0;
                write!(table, " {} |", if right { "right" } else { "data lost" }).unwrap();
            }
        }
    }
    table
}

#[test]
fn the_documentation_says_what_each_policy_loses() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/caches.md");
    let docs = std::fs::read_to_string(path).expect("the documentation is there");
    let table = computed();
    println!("{table}");
    assert!(docs.contains(&table), "docs/caches.md lacks this table:\n{table}");
}

#[test]
fn the_default_is_the_cheapest_policy_that_loses_nothing() {
    let boots = [Scenario::BootInOrder, Scenario::BootVcpu0Late, Scenario::BootVcpu0Never];
    let safe = CachePolicy::ALL.iter().copied().filter(|&policy| {
        let mut cells = Manners::ALL
            .into_iter()
            .flat_map(|manners| Scenario::ALL.into_iter().map(move |scenario| (manners, scenario)));
        cells.all(|(manners, scenario)| cell(policy, manners, scenario).0)
    });
    let cost = |policy: CachePolicy| -> u64 {
        let of = |manners| move |scenario| cell(policy, manners, scenario).1;
        Manners::ALL.into_iter().flat_map(|manners| boots.map(of(manners))).sum()
    };
    let costs: Vec<_> = safe.map(|policy| (cost(policy), policy)).collect();
    println!("{costs:?}");
    let cheapest = costs.iter().min_by_key(|(cost, _)| *cost).expect("one is safe");
    assert_eq!(cheapest.1, CachePolicy::DEFAULT);
    assert!(costs.len() > 1, "there is something to compare with");
}

#[test]
fn no_policy_loses_data_if_the_guest_cannot_bypass_caches() {
    for &policy in CachePolicy::ALL {
        for scenario in Scenario::ALL {
            for mood in Mood::all().take(20) {
                let machine = Machine::new(mood, true);
                let result = with_guest(&machine, config(policy), false, |guest| {
                    let cpus = [
                        Cpu::new(guest, 0, Manners::Relies),
                        Cpu::new(guest, 1, Manners::Relies),
                        Cpu::new(guest, 2, Manners::Relies),
                    ];
                    scenario.run(cpus, &machine)?;
                    let totals = guest.stats().totals;
                    assert_eq!((totals.flushes, totals.flushed_bytes), (0, 0));
                    assert_eq!(totals.touched_bytes + totals.mapped_bytes, 0);
                    Ok(())
                });
                assert_eq!(result, Ok::<_, crate::vm::LostWrite>(()), "{policy:?} {scenario:?}");
            }
        }
    }
}

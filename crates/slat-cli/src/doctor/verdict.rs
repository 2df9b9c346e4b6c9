//! Decides which scenarios a host can run, by the requirements of each.

use super::{CHECK, Change, EMULATE, Finding, Status, scenarios, tools, watch};
use crate::kvm::Guests;
use crate::needs::GUEST;
use serde::Serialize;
use slat_kernel::vm::qemu::{AARCH64, X86_64};
use slat_lab::scenario::Scenarios;

/// The verdict on one scenario.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Verdict {
    /// Name of the scenario.
    pub scenario: String,
    /// Whether it can run.
    pub runs: bool,
    /// Requirements that the host lacks: one finding of each entry would be enough.
    pub lacks: Vec<Vec<&'static str>>,
    /// Findings that matter for the scenario and are limited or missing.
    pub limited: Vec<&'static str>,
}

impl Verdict {
    /// Returns the verdict in words.
    pub fn sentence(&self) -> String {
        let lacks: Vec<_> = self.lacks.iter().map(|any| any.join(" or ")).collect();
        match (self.runs, self.limited.len()) {
            (false, _) => format!("no: it needs {}", lacks.join(", and ")),
            (true, 0) => "yes".to_owned(),
            (true, 1) => "yes, with 1 limitation".to_owned(),
            (true, count) => format!("yes, with {count} limitations"),
        }
    }
}

/// Returns the requirements of a scenario: one finding of each entry is enough.
fn needs(scenario: &str) -> &'static [&'static [&'static str]] {
    match Guests::ALL.iter().find(|entry| entry.name == scenario) {
        Some(entry) => entry.needs,
        None if scenario == CHECK => GUEST,
        None if scenario != EMULATE => &[&[watch::SEEN]],
        None => &[&[X86_64.program, AARCH64.program], &[tools::DPKG_DEB]],
    }
}

/// Returns the verdict on a scenario, for the host of these findings.
pub fn verdict(findings: &[Finding], scenario: &str) -> Verdict {
    let named = |name: &str| findings.iter().find(|finding| finding.name == name);
    let is_there = |name: &&str| named(name).is_some_and(|f| f.status != Status::Missing);
    let unmet = needs(scenario).iter().filter(|any| !any.iter().any(is_there));
    let lacks: Vec<Vec<&'static str>> = unmet.map(|any| any.to_vec()).collect();
    let matters = findings.iter().filter(|finding| finding.matters_for(scenario));
    let limited = matters.filter(|finding| finding.status != Status::Ok).map(|f| f.name);
    Verdict {
        scenario: scenario.to_owned(),
        runs: lacks.is_empty(),
        limited: limited.collect(),
        lacks,
    }
}

/// Returns the verdict on each scenario.
pub fn verdicts(findings: &[Finding]) -> Vec<Verdict> {
    scenarios().map(|scenario| verdict(findings, scenario)).collect()
}

/// Returns the message for a scenario that cannot run: what the host lacks, and what would change
/// that.
pub fn refusal(findings: &[Finding], verdict: &Verdict) -> String {
    let mut text = format!("this host cannot run {}", verdict.scenario);
    for name in verdict.lacks.iter().flatten() {
        let Some(finding) = findings.iter().find(|finding| finding.name == *name) else { continue };
        let change = finding.change.as_ref().map_or_else(String::new, Change::sentence);
        text += &format!("\n  {name}: {}; to change it: {change}", finding.found);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::{examine, fake, tracking};

    #[test]
    fn what_a_scenario_needs_is_looked_at_and_matters_for_it() {
        let findings = examine(&fake::server().evidence());
        for scenario in scenarios() {
            for name in needs(scenario).iter().flat_map(|any| any.iter()) {
                let finding = findings.iter().find(|finding| finding.name == *name);
                let finding = finding.unwrap_or_else(|| panic!("{scenario} needs {name}"));
                assert!(finding.matters_for(scenario), "{scenario}: {name}");
            }
        }
    }

    #[test]
    fn one_of_several_ways_is_enough_and_none_is_not() {
        let mut findings = examine(&fake::server().evidence());
        let ways = [tracking::PAGE_IDLE, tracking::MGLRU];
        for (number, way) in ways.into_iter().enumerate() {
            assert!(verdict(&findings, "age").runs, "{number} gone");
            let finding = findings.iter_mut().find(|finding| finding.name == way).unwrap();
            finding.status = Status::Missing;
        }
        let verdict = verdict(&findings, "age");
        assert_eq!(verdict.lacks, [ways.to_vec()]);
        assert!(verdict.sentence().contains("page_idle or MGLRU"));
    }

    #[test]
    fn without_kvm_only_the_emulator_remains() {
        let findings = examine(&fake::cloud().evidence());
        let verdicts = verdicts(&findings);
        let run: Vec<_> = verdicts.iter().filter(|v| v.runs).map(|v| &*v.scenario).collect();
        assert_eq!(run, ["emulate"]);
        let text = refusal(&findings, &verdicts[0]);
        assert!(text.contains("cannot run populate") && text.contains("nested"), "{text}");
    }
}

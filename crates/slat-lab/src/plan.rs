//! A plan: a matrix of a program's command lines, in a file.
//!
//! A cell is one command line in one repeat. Its number depends on the file alone, so that hosts,
//! or jobs of a scheduler, can share the cells without communication.

pub mod cell;
pub mod run;

use crate::child;
use crate::cli::Share;
use crate::failure::bad_input;
use crate::scenario::Program;
use anyhow::Context;
use cell::{Cell, option_of};
use serde::Deserialize;
use std::path::Path;
use std::time::Duration;

/// The version of plan files.
const VERSION: u32 = 1;

/// Most cells of a plan; more are probably a mistake.
const MOST: usize = 100_000;

/// A plan, with every cell checked.
#[derive(Debug)]
pub struct Plan {
    /// All cells, in the order of their numbers.
    pub cells: Vec<Cell>,
    /// The time limit of each cell.
    pub limit: Option<Duration>,
}

/// The content of the file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    version: u32,
    scenarios: Vec<String>,
    #[serde(default)]
    settings: toml::Table,
    #[serde(default)]
    exclude: Vec<toml::Table>,
    #[serde(default = "once")]
    repeats: u32,
    time_limit: Option<String>,
}

fn once() -> u32 {
    1
}

/// The name of the scenario in `exclude`, next to the settings.
const SCENARIO: &str = "scenario";

/// An option with one of its values.
type Setting = (String, toml::Value);

impl Plan {
    /// Reads a plan, and checks the command line of each cell.
    ///
    /// # Errors
    /// The file cannot be read, is no plan, or has a cell whose command line the program would
    /// refuse.
    pub fn read(program: &'static Program, path: &Path) -> anyhow::Result<Self> {
        let name = path.display();
        let text = std::fs::read_to_string(path)
            .map_err(|error| bad_input(format!("{name}: {error}; give the file of a plan")))?;
        Self::parse(program, &text).map_err(|error| bad_input(format!("{name}: {error:#}")))
    }

    fn parse(program: &'static Program, text: &str) -> anyhow::Result<Self> {
        let file: File = toml::from_str(text)?;
        let refuse = |why: String| Err(anyhow::Error::msg(why));
        if file.version != VERSION {
            return refuse(format!(
                "version {} of plans; this {} knows {VERSION}",
                file.version, program.name
            ));
        }
        if file.scenarios.is_empty() {
            return refuse(format!("scenarios is empty: name one, such as {:?}", program.example));
        }
        if file.repeats == 0 {
            return refuse("repeats is 0; 1 is the least".to_owned());
        }
        let scenarios: Vec<Vec<String>> =
            file.scenarios.iter().map(|text| words(program, text)).collect::<Result<_, _>>()?;
        if let Some((_, twice)) = repeated(&scenarios) {
            return refuse(format!(
                "scenarios has `{}` twice; `repeats` measures all cells more than once",
                twice.join(" ")
            ));
        }
        let settings = settings(&file.settings)?;
        let combinations = combinations(&settings, scenarios.len() * file.repeats as usize)?;
        let exclude = excluded(program, &file, &scenarios, &settings)?;
        let mut plan = Self { cells: Vec::new(), limit: limit(file.time_limit.as_deref())? };
        // Each repeat runs all cells before the next one begins, so that the machine's drift over
        // hours affects all cells alike.
        for repeat in 1..=file.repeats {
            for scenario in &scenarios {
                for combination in &combinations {
                    if !exclude.iter().any(|rule| rule.fits(scenario, combination)) {
                        let number = plan.cells.len() + 1;
                        let cell = Cell::new(program, number, repeat, scenario, combination);
                        plan.cells.push(cell);
                    }
                }
            }
        }
        if plan.cells.is_empty() {
            return refuse("every combination is excluded: no cell is left".to_owned());
        }
        // All repeats have the same command lines.
        plan.cells.iter().filter(|cell| cell.repeat == 1).try_for_each(Cell::check)?;
        Ok(plan)
    }
}

/// Parses a scenario's words, with or without the program's name.
fn words(program: &Program, text: &str) -> anyhow::Result<Vec<String>> {
    let words = shlex::split(text).with_context(|| format!("`{text}`: a quote is not closed"))?;
    let skip = usize::from(words.first().is_some_and(|word| word == program.name));
    let words = words[skip..].to_vec();
    child::check_words(program, &words)?;
    Ok(words)
}

/// Returns the first element that occurred before, with its place.
fn repeated<T: PartialEq>(list: &[T]) -> Option<(usize, &T)> {
    list.iter().enumerate().find(|(place, one)| list[..*place].contains(one))
}

/// Returns the settings in the order of the file, each with all of its values.
fn settings(table: &toml::Table) -> anyhow::Result<Vec<(String, Vec<toml::Value>)>> {
    let mut all = Vec::new();
    for (name, values) in table {
        option_of(name)?;
        let toml::Value::Array(values) = values else {
            anyhow::bail!("settings.{name} is no list; write {name} = [{values}]");
        };
        anyhow::ensure!(!values.is_empty(), "settings.{name} has no value; leave it out");
        for value in values {
            cell::written(name, value)?;
        }
        if let Some((_, twice)) = repeated(values) {
            anyhow::bail!(
                "settings.{name} has {twice} twice; `repeats` measures it more than once"
            );
        }
        all.push((name.clone(), values.clone()));
    }
    Ok(all)
}

/// Returns all combinations. The first setting changes most slowly.
fn combinations(
    settings: &[(String, Vec<toml::Value>)],
    times: usize,
) -> anyhow::Result<Vec<Vec<Setting>>> {
    let mut sizes = settings.iter().map(|(_, values)| values.len());
    let cells = sizes.try_fold(times, usize::checked_mul);
    anyhow::ensure!(
        cells.is_some_and(|cells| cells <= MOST),
        "more than {MOST} cells; fewer settings, or fewer repeats"
    );
    let mut all = vec![Vec::new()];
    for (name, values) in settings {
        all = all
            .iter()
            .flat_map(|before: &Vec<Setting>| {
                values.iter().map(move |value| {
                    let mut one = before.clone();
                    one.push((name.clone(), value.clone()));
                    one
                })
            })
            .collect();
    }
    Ok(all)
}

/// A combination to leave out: all of its settings have to match.
struct Exclude {
    scenario: Option<Vec<String>>,
    settings: Vec<Setting>,
}

impl Exclude {
    fn fits(&self, scenario: &[String], combination: &[Setting]) -> bool {
        self.scenario.as_ref().is_none_or(|wanted| wanted == scenario)
            && self.settings.iter().all(|setting| combination.contains(setting))
    }
}

fn excluded(
    program: &Program,
    file: &File,
    scenarios: &[Vec<String>],
    settings: &[(String, Vec<toml::Value>)],
) -> anyhow::Result<Vec<Exclude>> {
    let mut all = Vec::new();
    for table in &file.exclude {
        anyhow::ensure!(!table.is_empty(), "an [[exclude]] without a setting leaves nothing");
        let mut rule = Exclude { scenario: None, settings: Vec::new() };
        for (name, value) in table {
            if name == SCENARIO {
                let text = value.as_str().context("exclude.scenario is no text")?;
                let wanted = words(program, text)?;
                anyhow::ensure!(
                    scenarios.contains(&wanted),
                    "exclude: `{text}` is none of the scenarios"
                );
                rule.scenario = Some(wanted);
                continue;
            }
            let known = settings.iter().find(|(known, _)| known == name);
            let (_, values) =
                known.with_context(|| format!("exclude: `{name}` is none of the settings"))?;
            anyhow::ensure!(
                values.contains(value),
                "exclude: {value} is none of the values of {name}"
            );
            rule.settings.push((name.clone(), value.clone()));
        }
        all.push(rule);
    }
    Ok(all)
}

fn limit(text: Option<&str>) -> anyhow::Result<Option<Duration>> {
    let Some(text) = text else { return Ok(None) };
    let limit = crate::cli::time::some(text);
    Ok(Some(limit.map_err(|error| anyhow::anyhow!("time-limit: {error}"))?))
}

/// Returns the cells of a share. It has every N-th cell, so that each share has some of every part
/// of the plan, and all repeats of a cell are in one share if N divides the number of cells of a
/// repeat.
///
/// # Errors
/// There is no cell of that number.
pub fn share_of(share: Option<Share>, cells: &[Cell]) -> anyhow::Result<Vec<&Cell>> {
    Ok(match share {
        None => cells.iter().collect(),
        Some(Share::Part(part, parts)) => cells.iter().skip(part - 1).step_by(parts).collect(),
        Some(Share::One(number)) => {
            let cell = cells.get(number - 1);
            vec![cell.ok_or_else(|| {
                bad_input(format!(
                    "--cell {number}: the plan has {} cells; --list prints them",
                    cells.len()
                ))
            })?]
        }
    })
}

/// Returns the program's parser, ready to check a plan's settings.
fn parser(program: &Program) -> clap::Command {
    let mut parser = (program.command)();
    parser.build();
    parser
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::fake::PROGRAM;

    fn lines(text: &str) -> Vec<String> {
        let plan = Plan::parse(&PROGRAM, text).unwrap_or_else(|error| panic!("{error:#}"));
        plan.cells.iter().map(Cell::line).collect()
    }

    fn refused(text: &str, words: &[&str]) {
        let error = format!("{:#}", Plan::parse(&PROGRAM, text).unwrap_err());
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }

    const TWO: &str = "version = 1\nscenarios = [\"bench split\"]\n[settings]\n";

    #[test]
    fn cells_are_every_combination_with_all_of_a_repeat_before_the_next() {
        let plan = "version = 1\nscenarios = ['slat bench split --memory 1G', 'bench engine']\n\
                    repeats = 2\n[settings]\ngranule = ['4k', '64k']\nrounds = [3]\n";
        // `bench split` has no --rounds.
        let once = [
            "slat bench split --memory 1G --granule 4k",
            "slat bench split --memory 1G --granule 64k",
            "slat bench engine --granule 4k",
            "slat bench engine --granule 64k",
        ];
        assert_eq!(lines(&plan.replace("rounds = [3]", "")), [once, once].concat());
        refused(plan, &["--rounds", "bench split"]);
    }

    #[test]
    fn a_flag_is_there_or_not_and_numbers_are_written_as_they_are() {
        let plan = "version = 1\nscenarios = ['bench engine']\n[settings]\n\
                    quick = [true, false]\nrounds = [3]";
        assert_eq!(
            lines(plan),
            ["slat bench engine --quick --rounds 3", "slat bench engine --rounds 3"]
        );
        refused(
            &plan.replace("rounds = [3]", "rounds = [true]"),
            &["--rounds", "a value is required"],
        );
    }

    #[test]
    fn what_is_excluded_fits_in_all_that_it_names() {
        let plan = "version = 1\nscenarios = ['bench split', 'bench engine']\n\
                    exclude = [{ granule = '64k', scenario = 'bench engine' }, \
                    { granule = '16k' }]\n[settings]\ngranule = ['4k', '16k', '64k']";
        let left = ["split --granule 4k", "split --granule 64k", "engine --granule 4k"];
        assert_eq!(lines(plan), left.map(|words| format!("slat bench {words}")));
        refused(&plan.replace("'16k' }", "'1k' }"), &["1k", "granule"]);
        refused(&plan.replace("{ granule = '16k' }", "{ grain = 1 }"), &["grain", "settings"]);
    }

    #[test]
    fn what_is_wrong_shows_before_anything_runs() {
        refused("version = 2\nscenarios = ['bench split']", &["version 2"]);
        refused("version = 1\nscenarios = []", &["empty"]);
        refused("version = 1\nscenarios = ['bench splat']", &["splat", "bench splat"]);
        refused("version = 1\nscenarios = ['bench split --help']", &["--help"]);
        refused("version = 1\nscenarios = ['bench split -o x']", &["--output"]);
        refused("version = 1\nscenarios = ['compare a b']", &["nothing to measure"]);
        refused("version = 1\nscenarios = ['bench split', 'slat bench split']", &["twice"]);
        refused("version = 1\nscenarios = ['bench split']\nrepeat = 3", &["repeat", "repeats"]);
        refused("version = 1\nscenarios = ['bench split']\nrepeats = 0", &["repeats"]);
        refused("version = 1\nscenarios = ['bench split']\ntime-limit = '10'", &["10", "10m"]);
        for (setting, words) in [
            ("when = ['never']", &["never", "--when", "enable"][..]),
            ("backing = ['2m', '2m']", &["2m", "twice"]),
            ("backing = ['2m']\nbacking = ['1g']", &["duplicate key"]),
            ("backing = '2m'", &["no list"]),
            ("backing = []", &["backing"]),
            ("backing = [{}]", &["backing"]),
            ("--backing = ['2m']", &["without dashes"]),
            ("'backing 2m' = ['2m']", &["backing 2m"]),
            ("output = ['x']", &["--output"]),
            ("bcking = ['2m']", &["bcking"]),
        ] {
            refused(&format!("{TWO}{setting}"), words);
        }
    }

    #[test]
    fn a_scenario_does_not_say_what_a_setting_says() {
        for scenario in ["--backing 2m", "--backing=2m", "-s 2m", "-s2m"] {
            let plan = format!(
                "version = 1\nscenarios = ['bench split {scenario}']\n[settings]\nbacking = ['4k']"
            );
            refused(&plan, &["--backing", "both"]);
        }
    }

    #[test]
    fn shares_are_even_and_together_all() {
        let settings = "samples = [10, 11, 12, 13, 14, 15, 16]";
        let plan = Plan::parse(&PROGRAM, &format!("{TWO}{settings}")).unwrap();
        let numbers = |text: &str| -> Vec<usize> {
            let share = share_of(Some(text.parse().unwrap()), &plan.cells).unwrap();
            share.iter().map(|cell| cell.number).collect()
        };
        assert_eq!(numbers("1/3"), [1, 4, 7]);
        assert_eq!(numbers("2/3"), [2, 5]);
        assert_eq!(numbers("3/3"), [3, 6]);
        assert_eq!(numbers("6"), [6]);
        assert!(numbers("9/9").is_empty());
        assert_eq!(share_of(None, &plan.cells).unwrap().len(), 7);
        let error = share_of(Some(Share::One(8)), &plan.cells).unwrap_err().to_string();
        assert!(error.contains("7 cells"), "{error}");
    }

    #[test]
    fn shares_that_cannot_be_are_refused() {
        for (text, word) in [("0", "from 1"), ("0/4", "from 1"), ("5/4", "4/4"), ("x/2", "2/5")] {
            let error = text.parse::<Share>().unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}

//! Counts of calls of the kernel's functions, by kprobes (Documentation/trace/kprobetrace.rst).
//!
//! A kprobe adds hundreds of instructions to each call of its function, so runs that measure times
//! do not count calls. The events have names with this process's number, and are removed when
//! counting ends. They are enabled in an instance of the tracer of their own, so that other users
//! of the tracer are not disturbed.

use crate::Error;
use crate::stats::Changes;
use crate::trace;
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Prefix of the names of such counts.
pub const CALLS: &str = "calls_";

/// Kprobes that count calls of functions until they are dropped.
#[derive(Debug)]
pub(crate) struct Probes {
    root: PathBuf,
    instance: PathBuf,
    group: String,
    functions: Vec<String>,
}

/// Number of calls of each function so far.
pub(crate) type CallCounts = BTreeMap<String, u64>;

impl Probes {
    /// Starts to count. Returns `None` if there are no functions.
    ///
    /// # Errors
    /// [`Error::NoProbes`] if this process may not use kprobes, or if a function cannot be probed
    /// because it does not exist, is inlined, or was compiled into several. A function whose name
    /// ends in `?` is skipped in that case.
    pub fn start(functions: &[String]) -> Result<Option<Self>, Error> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        if functions.is_empty() {
            return Ok(None);
        }
        let refused = |why: &str, error: &io::Error| Error::NoProbes(format!("{why} ({error})"));
        let root = trace::root().map_err(|why| Error::NoProbes(format!("no kprobes: {why}")))?;
        let (process, count) = (std::process::id(), COUNT.fetch_add(1, Relaxed));
        let group = format!("slat_{process}_{count}");
        let instance = root.join("instances").join(format!("slat-probes-{process}-{count}"));
        fs::create_dir(&instance).map_err(|error| refused("kprobes need root", &error))?;
        // From here on, dropping `this` removes the instance.
        let mut this = Self { root, instance, group, functions: Vec::new() };
        let symbols = fs::read_to_string("/proc/kallsyms")
            .map_err(|error| refused("cannot read /proc/kallsyms", &error))?;
        let symbols =
            candidates(&symbols, functions.iter().map(|asked| asked.trim_end_matches('?')));
        for asked in functions {
            let (name, optional) = asked.strip_suffix('?').map_or((&**asked, false), |n| (n, true));
            let added = match symbols.get(name).and_then(|found| chosen(found, name)) {
                None => Err(io::Error::other(
                    "the kernel has no such function, inlined it, or made several of it",
                )),
                Some(symbol) => this.add(name, symbol),
            };
            match added {
                Ok(()) => this.functions.push(name.to_owned()),
                Err(_) if optional => {}
                Err(error) => {
                    return Err(refused(&format!("cannot count calls of {name}"), &error));
                }
            }
        }
        let enable = this.instance.join("events").join(&this.group).join("enable");
        if !this.functions.is_empty() {
            fs::write(enable, "1").map_err(|error| refused("cannot enable kprobes", &error))?;
        }
        Ok(Some(this))
    }

    fn add(&self, name: &str, symbol: &str) -> io::Result<()> {
        self.write(&format!("p:{}/{} {symbol}", self.group, self.event(name)))
    }

    /// Returns the name of a function's event. It includes the group, because `kprobe_profile` does
    /// not show groups.
    fn event(&self, name: &str) -> String {
        format!("{}_{name}", self.group)
    }

    fn write(&self, line: &str) -> io::Result<()> {
        let events = self.root.join("kprobe_events");
        OpenOptions::new().append(true).open(events)?.write_all(line.as_bytes())
    }

    /// Returns the number of calls of each function so far, of those that the kernel tells.
    pub fn read(&self) -> CallCounts {
        let text = fs::read_to_string(self.root.join("kprobe_profile")).unwrap_or_default();
        self.functions
            .iter()
            .filter_map(|name| Some((name.clone(), hits(&text, &self.event(name))?)))
            .collect()
    }
}

impl Drop for Probes {
    fn drop(&mut self) {
        // If this fails, an event that is not enabled stays until the next boot.
        let enable = self.instance.join("events").join(&self.group).join("enable");
        let _ = fs::write(enable, "0");
        let _ = fs::remove_dir(&self.instance);
        for name in &self.functions {
            let _ = self.write(&format!("-:{}/{}", self.group, self.event(name)));
        }
    }
}

/// Counts the calls of functions while `done` runs. A count has the name of its function, without
/// the `?`.
///
/// # Errors
/// [`Error::NoProbes`] if this process may not use kprobes, or if a function cannot be probed.
pub fn during<T>(
    functions: &[String],
    done: impl FnOnce() -> T,
) -> Result<(T, BTreeMap<String, u64>), Error> {
    let probes = Probes::start(functions)?;
    let read = || probes.as_ref().map(Probes::read).unwrap_or_default();
    let before = read();
    let done = done();
    let calls = read().into_iter().filter_map(|(name, count)| {
        let calls = count.saturating_sub(*before.get(&name)?);
        Some((name, calls))
    });
    Ok((done, calls.collect()))
}

/// Returns the calls between two readings, including functions that were not called.
pub(crate) fn changes(before: &CallCounts, after: &CallCounts) -> Changes {
    let change = |(name, count): (&String, &u64)| {
        let calls = count.saturating_sub(*before.get(name)?);
        Some((format!("{CALLS}{name}"), calls as i64))
    };
    after.iter().filter_map(change).collect()
}

/// How the names of functions go on that the compiler derives from another.
const MADE: [&str; 3] = [".isra.", ".constprop.", ".part."];

/// Returns for each function its symbol and those that the compiler derived from it, of the text of
/// `/proc/kallsyms`, which is read once: it has a hundred thousand lines.
fn candidates<'a>(
    symbols: &'a str,
    names: impl Iterator<Item = &'a str>,
) -> BTreeMap<&'a str, Vec<&'a str>> {
    let mut all: BTreeMap<_, Vec<_>> = names.map(|name| (name, Vec::new())).collect();
    for line in symbols.lines() {
        let Some((_, kind_and_symbol)) = line.split_once(' ') else { continue };
        let Some((kind, symbol)) = kind_and_symbol.split_once(' ') else { continue };
        if !matches!(kind, "t" | "T" | "w" | "W") {
            continue;
        }
        // A module's name follows.
        let symbol = symbol.split('\t').next().unwrap_or(symbol);
        if let Some(own) = all.get_mut(symbol) {
            own.push(symbol);
        }
        let (name, rest) = symbol.split_at(symbol.find('.').unwrap_or(symbol.len()));
        if MADE.iter().any(|made| rest.starts_with(made))
            && let Some(derived) = all.get_mut(name)
        {
            derived.push(symbol);
        }
    }
    all
}

/// Returns the symbol of a function: its own, or the only one that the compiler derived from it. If
/// there are several of either, none of them counts all calls.
fn chosen<'a>(found: &[&'a str], name: &'a str) -> Option<&'a str> {
    // Files may have functions of one name each.
    match found.iter().filter(|symbol| **symbol == name).count() {
        0 => found.first().filter(|_| found.len() == 1).copied(),
        own => (own == 1).then_some(name),
    }
}

/// Returns how often an event occurred, from a `kprobe_profile` with name, hits and misses. Misses
/// are calls as well: the kernel made them from within another probe.
fn hits(profile: &str, event: &str) -> Option<u64> {
    let of = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [name, hits, misses] = words[..] else { return None };
        (name == event).then(|| Some(hits.parse::<u64>().ok()? + misses.parse::<u64>().ok()?))?
    };
    profile.lines().find_map(of)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn symbol(symbols: &str, name: &str) -> Option<String> {
        chosen(&candidates(symbols, [name].into_iter())[name], name).map(str::to_owned)
    }

    #[test]
    fn a_function_is_found_by_its_name_or_its_compiled_variant() {
        let symbols = "ffff800080000000 t stage2_split_walker\n\
            ffff800080000010 t stage2_flush_vm.isra.0\n\
            ffff800080000020 d stage2_data\n\
            ffff800080000030 t stage2_split_walker_other\n";
        assert_eq!(symbol(symbols, "stage2_split_walker").unwrap(), "stage2_split_walker");
        assert_eq!(symbol(symbols, "stage2_flush_vm").unwrap(), "stage2_flush_vm.isra.0");
        // By the compiler's name, too.
        assert!(symbol(symbols, "stage2_flush_vm.isra.0").is_some());
        assert_eq!(symbol(symbols, "stage2_data"), None);
        assert_eq!(symbol(symbols, "stage2_split"), None);
        let two = "0 t walk.isra.0\n0 t walk.constprop.0\n";
        assert_eq!(symbol(two, "walk"), None);
        assert_eq!(symbol(&format!("{two}0 T walk\n"), "walk").unwrap(), "walk");
        assert_eq!(symbol("0 t walk\t[kvm]\n0 t walk\t[kvm_amd]\n", "walk"), None);
    }

    #[test]
    fn calls_are_counted_between_readings_and_zero_is_reported() {
        let profile = "  stage2_split_walker          16384               3\n  other   1   0\n";
        assert_eq!(hits(profile, "stage2_split_walker"), Some(16387));
        assert_eq!(hits(profile, "stage2"), None);
        let counted = |a, b| CallCounts::from([("a".to_owned(), a), ("b".to_owned(), b)]);
        let changes = changes(&counted(3, 4), &counted(10, 4));
        assert_eq!(changes, [("calls_a".to_owned(), 7), ("calls_b".to_owned(), 0)].into());
    }
}

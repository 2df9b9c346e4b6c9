//! The order in which a guest uses its pages, computed before it runs.

use super::settings::AccessPattern;
use anyhow::Context;
use fastrand::Rng;
use slat_lab::failure::bad_input;
use slat_reclaim::bounds::Zipf;
use std::fs;
use std::io::Read;
use std::path::Path;

/// One access in `WRITES` is a write.
const WRITES: u32 = 4;

/// A page; the highest bit tells whether it is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Use(u32);

impl Use {
    const WRITE: u32 = 1 << 31;

    pub const fn new(page: u32, write: bool) -> Self {
        Self(page | if write { Self::WRITE } else { 0 })
    }

    pub const fn page(self) -> u32 {
        self.0 & !Self::WRITE
    }

    pub const fn writes(self) -> bool {
        self.0 & Self::WRITE != 0
    }
}

/// Returns the uses of one vCPU of `vcpus` in a guest of `pages`, of which `memory` fit.
pub fn uses(
    pattern: AccessPattern,
    seed: u64,
    pages: u32,
    memory: u32,
    accesses: u64,
    vcpu: u16,
    vcpus: u16,
) -> Vec<Use> {
    let mut rng = Rng::with_seed(0x51a7 + u64::from(vcpu) + (seed << 16));
    let some = |rng: &mut Rng, page: u32| Use::new(page, rng.u32(..WRITES) == 0);
    let own = own(pages, vcpu, vcpus);
    match pattern {
        AccessPattern::Uniform => (0..accesses)
            .map(|_| {
                let page = rng.u32(..pages);
                some(&mut rng, page)
            })
            .collect(),
        AccessPattern::Zipf => {
            let mut order: Vec<u32> = (0..pages).collect();
            Rng::with_seed(0x21bf + (seed << 16)).shuffle(&mut order);
            let zipf = Zipf::new(order);
            (0..accesses)
                .map(|_| {
                    let page = zipf.page(rng.f64());
                    some(&mut rng, page)
                })
                .collect()
        }
        AccessPattern::Scan => (0..accesses)
            .map(|index| {
                let page = own.start + (index % u64::from(own.end - own.start).max(1)) as u32;
                some(&mut rng, page)
            })
            .collect(),
        AccessPattern::Phase => (0..accesses)
            .map(|index| {
                let phase = index * 4 / accesses;
                let part = (u64::from(memory) * 4 / 5).max(1);
                let first = phase * u64::from(pages) / 4;
                let page = match rng.u32(..10) {
                    0 => rng.u64(..u64::from(pages)),
                    _ => (first + rng.u64(..part)) % u64::from(pages),
                };
                some(&mut rng, page as u32)
            })
            .collect(),
        AccessPattern::Fill => own.map(|page| Use::new(page, true)).collect(),
        AccessPattern::Trace => Vec::new(),
    }
}

/// Returns a vCPU's share of the pages.
pub fn own(pages: u32, vcpu: u16, vcpus: u16) -> std::ops::Range<u32> {
    let begin = |vcpu: u16| (u64::from(pages) * u64::from(vcpu) / u64::from(vcpus)) as u32;
    begin(vcpu)..begin(vcpu + 1)
}

/// A trace of GNU sort over 60,000 numbers of up to 19 digits: 4 KiB pages in the order of the
/// misses of a buffer of 32 entries with replacement of the least recently used (instruction
/// fetches, loads, stores). Pages are numbered by first use.
const SORT: &[u8] = include_bytes!("../../../traces/sort.txt.xz");

/// Reads a trace, from a file or the built-in one; returns the uses and the number of pages. Pages
/// are numbered as they first appear.
///
/// # Errors
/// The file cannot be read, or is no trace.
pub fn trace(path: Option<&Path>) -> anyhow::Result<(Vec<Use>, u32)> {
    let Some(path) = path else {
        let mut text = String::new();
        let mut packed = lzma_rust2::XzReader::new(SORT, true);
        packed.read_to_string(&mut text).context("the trace that comes with the program")?;
        return parse("sort.txt", &text);
    };
    let text = fs::read_to_string(path)
        .with_context(|| format!("cannot read the trace {}", path.display()))
        .map_err(|error| bad_input(format!("{error:#}")))?;
    parse(&path.display().to_string(), &text)
}

fn parse(name: &str, text: &str) -> anyhow::Result<(Vec<Use>, u32)> {
    let mut numbers = std::collections::HashMap::new();
    let mut uses = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let (line, write) = match line.trim().strip_prefix('w') {
            Some(rest) => (rest.trim(), true),
            None => (line.trim(), false),
        };
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let page: u64 = line.parse().map_err(|_| {
            bad_input(format!(
                "{name}, line {}: “{line}” is no page; write its number, with w in front if it is \
                 written",
                index + 1
            ))
        })?;
        let next = numbers.len() as u32;
        uses.push(Use::new(*numbers.entry(page).or_insert(next), write));
    }
    if uses.is_empty() {
        return Err(bad_input(format!("{name} has no page in it")));
    }
    Ok((uses, numbers.len() as u32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use slat_reclaim::bounds::{
        fewest_refaults, refaults_by_frequency, refaults_of_lru, refaults_without_foresight,
    };

    #[test]
    fn the_most_frequent_stay_where_only_frequencies_are_known() {
        let uses = || [0, 1, 0, 2, 0, 1, 3, 0].into_iter();
        assert_eq!(refaults_by_frequency(4, 2, uses()), 4);
        assert_eq!(refaults_by_frequency(4, 3, uses()), 2);
        assert!(refaults_by_frequency(4, 2, uses()) >= fewest_refaults(4, 2, uses()));
    }

    #[test]
    fn without_foresight_what_was_used_most_is_there() {
        // Memory for two of four: all are alike, then 0 is ahead, then 0 and 1, then 0, and 1 or 2.
        let misses = |uses: &[u32]| refaults_without_foresight(4, 2, uses.iter().copied());
        assert!((misses(&[0]) - 0.5).abs() < 1e-9);
        assert!((misses(&[0, 1]) - (0.5 + 2.0 / 3.0)).abs() < 1e-9);
        assert!((misses(&[0, 1, 2]) - (0.5 + 2.0 / 3.0 + 1.0)).abs() < 1e-9);
        assert!((misses(&[0, 1, 2, 0]) - (0.5 + 2.0 / 3.0 + 1.0 + 1.0 / 3.0)).abs() < 1e-9);
        // Nothing can be known of pages that are used alike.
        let uniform: Vec<u32> = uses(AccessPattern::Uniform, 3, 1000, 600, 100_000, 0, 1)
            .iter()
            .map(|one| one.page())
            .collect();
        let misses = refaults_without_foresight(1000, 600, uniform.iter().copied());
        assert!((38_000.0..42_000.0).contains(&misses), "{misses}");
    }

    #[test]
    fn least_frequently_used_reaches_the_limit_without_foresight() {
        let (mut limit, mut counting) = (0.0, 0.0);
        for seed in 0..20 {
            let all: Vec<u32> = uses(AccessPattern::Zipf, seed, 200, 120, 4000, 0, 1)
                .iter()
                .map(|one| one.page())
                .collect();
            limit += refaults_without_foresight(200, 120, all.iter().copied());
            // The victim is the page used least so far, and among those the one used longest ago.
            let mut known = vec![(0, 0); 200];
            let mut kept: Vec<u32> = (80..200).collect();
            for (now, &page) in all.iter().enumerate() {
                if !kept.contains(&page) {
                    counting += 1.0;
                    let least = (0..120).min_by_key(|at| known[kept[*at] as usize]).unwrap();
                    kept[least] = page;
                }
                known[page as usize] = (known[page as usize].0 + 1, now);
            }
            assert!(fewest_refaults(200, 120, all.iter().copied()) as f64 <= limit);
        }
        assert!((0.98..1.02).contains(&(counting / limit)), "{counting}, not {limit}");
    }

    #[test]
    fn lru_refaults_every_page_of_a_scan_that_does_not_fit() {
        assert_eq!(refaults_of_lru(10, 9, (0..10).cycle().take(100)), 100);
        assert_eq!(refaults_of_lru(10, 10, (0..10).cycle().take(100)), 0);
        assert_eq!(refaults_of_lru(3, 2, [2, 1, 2, 0, 2, 1].into_iter()), 2);
    }

    #[test]
    fn beladys_rule_gives_up_what_is_used_last() {
        // Memory for 2 of 3 pages, after 0 1 2, which leaves 2 and either 0 or 1 in memory.
        assert_eq!(fewest_refaults(3, 2, [2, 1, 2, 1].into_iter()), 0);
        assert_eq!(fewest_refaults(3, 2, [0, 1, 2].into_iter()), 1);
        assert_eq!(fewest_refaults(3, 3, [0, 1, 2, 0].into_iter()), 0);
        // In each round of a scan, all pages miss but those that stay.
        let scan = || (0..10u32).cycle().take(1000);
        let refaults = fewest_refaults(10, 9, scan());
        assert!((100..=125).contains(&refaults), "{refaults}");
    }

    #[test]
    fn patterns_are_what_they_are_called() {
        let uses_of = |pattern| uses(pattern, 0, 1000, 600, 100_000, 0, 1);
        let count = |pattern| {
            let mut counts = vec![0u32; 1000];
            uses_of(pattern).iter().for_each(|it| counts[it.page() as usize] += 1);
            counts.sort_unstable_by(|a, b| b.cmp(a));
            counts
        };
        let uniform = count(AccessPattern::Uniform);
        assert!(uniform[0] < 200 && uniform[999] > 40, "{uniform:?}");
        let zipf = count(AccessPattern::Zipf);
        // The first page has 1/7.5 of all uses, and the tenth a tenth of that.
        assert!((12_000..15_000).contains(&zipf[0]), "{}", zipf[0]);
        assert!((1_100..1_700).contains(&zipf[9]), "{}", zipf[9]);
        assert_eq!(count(AccessPattern::Scan), [100; 1000]);
        let phase = uses_of(AccessPattern::Phase);
        let hot = phase[..25_000].iter().filter(|it| it.page() < 480).count();
        assert!(hot > 22_000, "{hot}");
        let writes = phase.iter().filter(|it| it.writes()).count();
        assert!((24_000..26_000).contains(&writes), "{writes}");
        let fill: Vec<u32> = (0..2u16)
            .flat_map(|vcpu| uses(AccessPattern::Fill, 0, 7, 3, 1, vcpu, 2))
            .map(Use::page)
            .collect();
        assert_eq!(fill, [0, 1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn a_trace_is_read_and_what_is_none_is_refused_by_line() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "# pages\n4711\nw 9\n4711\n").unwrap();
        let (uses, pages) = trace(Some(file.path())).unwrap();
        assert_eq!(
            (uses, pages),
            (vec![Use::new(0, false), Use::new(1, true), Use::new(0, false)], 2)
        );
        fs::write(file.path(), "1\nx\n").unwrap();
        assert!(trace(Some(file.path())).unwrap_err().to_string().contains("line 2"));
        fs::write(file.path(), "\n").unwrap();
        assert!(trace(Some(file.path())).is_err());
        assert!(trace(Some(Path::new("/nonexistent"))).is_err());
        let (uses, pages) = trace(None).unwrap();
        assert_eq!((uses.len(), pages), (12_033, 1018));
    }
}

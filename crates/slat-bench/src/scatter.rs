//! Choice of the pages that a guest touches: the same ones in each run.

/// Number of pages in a run of 32 MiB.
const RUN: u64 = (32 << 20) / 4096;

/// Returns a hundredth of `pages`, in runs of 32 MiB.
pub fn clustered(pages: u64) -> Vec<u64> {
    let mut rng = fastrand::Rng::with_seed(1);
    let mut runs: Vec<u64> = (0..pages / RUN).collect();
    rng.shuffle(&mut runs);
    runs.truncate((pages / 100).div_ceil(RUN) as usize);
    runs.iter().flat_map(|run| run * RUN..(run + 1) * RUN).collect()
}

/// Returns a hundredth of `pages`, one of each hundred, in random order.
pub fn scattered(pages: u64) -> Vec<u64> {
    let mut rng = fastrand::Rng::with_seed(2);
    let mut found: Vec<u64> =
        (0..pages / 100).map(|hundred| hundred * 100 + rng.u64(..100)).collect();
    rng.shuffle(&mut found);
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_hundredth_is_touched_and_no_page_twice() {
        let pages = 64 << 18;
        for touched in [clustered(pages), scattered(pages)] {
            let set: BTreeSet<_> = touched.iter().collect();
            assert_eq!(set.len(), touched.len());
            let part = set.len() as f64 / pages as f64;
            assert!((0.009..0.011).contains(&part), "{part}");
            assert!(set.last().is_some_and(|page| **page < pages));
        }
        let tables =
            |touched: &[u64]| touched.iter().map(|page| page / 512).collect::<BTreeSet<_>>();
        assert!(tables(&clustered(pages)).len() < 400);
        assert!(tables(&scattered(pages)).len() > 32_000);
    }
}

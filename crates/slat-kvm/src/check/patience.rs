//! How long something may take before it is called a hang.

use std::hint::black_box;
use std::time::Duration;

/// Work of a fast CPU for about a millisecond.
const PART: u32 = 1 << 19;

/// Does a fixed amount of work, in parts, more of it for a longer patience. Returns true as soon as
/// `is_over` does, false after all of the work.
///
/// Time alone tells no hang where a machine is emulated, or its CPUs are another's: there this work
/// takes as much longer as all else does.
pub fn outlast(patience: Duration, mut is_over: impl FnMut() -> bool) -> bool {
    let parts = patience.as_millis() / 10;
    (0..parts).any(|part| {
        let spun = (0..PART).fold(part as u64 | 1, |x, _| black_box(x ^ x << 13).rotate_left(7));
        black_box(spun);
        is_over()
    }) || is_over()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_over_before_the_work_is_done_is_no_hang() {
        let mut looks = 0;
        let mut after = |count| {
            looks += 1;
            looks == count
        };
        assert!(outlast(Duration::from_millis(50), || after(3)));
        assert!(!outlast(Duration::from_millis(50), || false));
    }
}

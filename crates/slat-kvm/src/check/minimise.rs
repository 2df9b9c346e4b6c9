//! Cuts a history in which something is lost down to few steps (delta debugging, Zeller 1999).

/// Returns the indices of few steps of which `loses` still says that something is lost. `loses`
/// runs the steps of some indices, and returns nothing when there is no more time.
///
/// The steps that are left are in their order. Steps that make no sense without the others are left
/// out when the history runs, so that every part of a history is one.
pub fn minimise(steps: usize, loses: &mut dyn FnMut(&[usize]) -> Option<bool>) -> Vec<usize> {
    let mut steps: Vec<usize> = (0..steps).collect();
    let mut parts = 2;
    while steps.len() > 1 {
        let size = steps.len().div_ceil(parts);
        let mut shorter = None;
        // Later steps first: most of them come after the loss.
        for part in (0..steps.len().div_ceil(size)).rev() {
            let (from, to) = (part * size, (part * size + size).min(steps.len()));
            let rest = [&steps[..from], &steps[to..]].concat();
            match loses(&rest) {
                None => return steps,
                Some(true) => {
                    shorter = Some(rest);
                    break;
                }
                Some(false) => {}
            }
        }
        match shorter {
            Some(rest) => {
                steps = rest;
                parts = parts.saturating_sub(1).max(2);
            }
            None if size == 1 => break,
            None => parts = (parts * 2).min(steps.len()),
        }
    }
    steps
}

//! Cuts a history in which something is lost down to few steps (delta debugging, Zeller 1999).

use super::history::{History, Step};

/// Returns a history of as few of the steps as `loses` still says it of. `loses` runs a history, and
/// returns nothing when there is no more time.
///
/// The steps that are left are in their order. Steps that make no sense without the others are left
/// out when the history runs, so that every part of a history is one.
pub fn minimise(history: &History, loses: &mut dyn FnMut(&History) -> Option<bool>) -> History {
    let with = |steps: Vec<Step>| History { steps, ..history.clone() };
    let mut steps = history.steps.clone();
    let mut parts = 2;
    while steps.len() > 1 {
        let size = steps.len().div_ceil(parts);
        let mut shorter = None;
        // Later steps first: most of them come after the loss.
        for part in (0..steps.len().div_ceil(size)).rev() {
            let from = part * size;
            let to = (from + size).min(steps.len());
            let rest = [&steps[..from], &steps[to..]].concat();
            match loses(&with(rest.clone())) {
                None => return with(steps),
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
    with(steps)
}

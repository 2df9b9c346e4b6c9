//! The order in which variants take turns, for all scenarios.

/// Returns the order of `count` variants in round `round`. Each variant finds the machine as the
/// one before left it. So every other round runs backwards, and after that the first place moves on
/// by one. Two variants take turns as A, B, B, A.
pub fn order(round: usize, count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    order.rotate_left(round / 2 % count.max(1));
    if round % 2 == 1 {
        order.reverse();
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_entrant_comes_once_a_round_and_is_first_in_some_round() {
        for count in 1..6 {
            let rounds: Vec<_> = (0..2 * count).map(|round| order(round, count)).collect();
            for round in &rounds {
                let mut sorted = round.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, (0..count).collect::<Vec<_>>());
            }
            let first = |place| rounds.iter().any(|round| round[0] == place);
            assert!((0..count).all(first), "{rounds:?}");
        }
        let two = [0, 1, 2, 3].map(|round| order(round, 2));
        assert_eq!(two, [[0, 1], [1, 0], [1, 0], [0, 1]]);
        assert!(order(3, 0).is_empty());
    }
}

//! Compares two outputs of one command by their words, independent of measured figures.

/// Replaces text that a page leaves out: a part of a line, or lines.
const LEFT_OUT: &str = "…";

/// Words that depend on figures: units, words between two figures or in place of one, and whether a
/// threshold was met.
const OF_FIGURES: [&str; 19] = [
    "s", "ms", "µs", "ns", "×", "%", "x", "KiB", "MiB", "GiB", "TiB", "MiB/s", "GiB/s", "ms/s",
    "GB/s", "to", "–", "met", "missed",
];

/// Returns the words of an output without figures, lines below headings, and text in parentheses.
/// Text between commas, and a name's value, are separate words.
fn words<'t>(lines: impl Iterator<Item = &'t str>) -> Vec<&'t str> {
    let is_figure = |word: &str| {
        word.trim_start_matches(['±', '−', '-', '+']).starts_with(|c: char| c.is_ascii_digit())
    };
    let mut depth = 0usize;
    let outside = lines.flat_map(str::split_whitespace).filter(|word| {
        let inside = depth > 0 || word.starts_with('(');
        depth += word.matches('(').count();
        depth = depth.saturating_sub(word.matches(')').count());
        !inside
    });
    let parts = outside
        .filter(|word| !is_figure(word))
        .flat_map(|word| word.split([',', '=']))
        .filter(|word| {
            let rule = word.chars().all(|c| c == '─');
            !rule && !is_figure(word) && !OF_FIGURES.contains(&word.trim_end_matches([';', '.']))
        });
    parts.map(|word| if word == "..." { LEFT_OUT } else { word }).collect()
}

/// Returns the first line of a page that differs from the output. Line breaks do not matter, nor
/// does the order of words between omissions, because the widths of figures decide how cells are
/// wrapped.
pub fn differs<'a>(shown: &'a [String], printed: &str) -> Option<&'a str> {
    let printed = words(printed.lines());
    let wanted = |lines: usize| words(shown[..lines].iter().map(String::as_str));
    if matches(&wanted(shown.len()), &printed) {
        return None;
    }
    let begins = |lines: usize| matches(&[wanted(lines), vec![LEFT_OUT]].concat(), &printed);
    let lines = (1..=shown.len()).find(|lines| !begins(*lines));
    Some(lines.map_or("(and no more)", |lines| shown[lines - 1].as_str()))
}

/// Returns whether the pieces between omissions are all there, in order, from beginning to end.
fn matches(wanted: &[&str], printed: &[&str]) -> bool {
    let pieces: Vec<_> = wanted.split(|word| *word == LEFT_OUT).map(sorted).collect();
    let mut rest = printed;
    for (index, piece) in pieces.iter().enumerate() {
        let (first, last) = (index == 0, index + 1 == pieces.len());
        if first && last && piece.len() != rest.len() || piece.len() > rest.len() {
            return false;
        }
        let possible = match (first, last) {
            (true, _) => 0..1,
            (_, true) => rest.len() - piece.len()..rest.len() - piece.len() + 1,
            _ => 0..rest.len() - piece.len() + 1,
        };
        let is_there = |at: &usize| sorted(&rest[*at..*at + piece.len()]) == *piece;
        let Some(at) = possible.into_iter().find(is_there) else {
            return false;
        };
        rest = &rest[at + piece.len()..];
    }
    true
}

fn sorted<'a>(words: &[&'a str]) -> Vec<&'a str> {
    let mut words = words.to_vec();
    words.sort_unstable();
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINTED: &str =
        "Heading\n a way   time\n────\n ring-8  1.2 ms ±19%\n  A note that\n  is long.\n";

    fn differs_from(shown: &str) -> Option<String> {
        let lines: Vec<_> = shown.lines().map(str::to_owned).collect();
        differs(&lines, PRINTED).map(str::to_owned)
    }

    #[test]
    fn figures_and_ends_of_lines_may_differ() {
        let shown = "Heading\na way time\n───\nring-8 17 µs\nA note\nthat is long.";
        assert_eq!(differs_from(shown), None);
    }

    #[test]
    fn what_a_measurement_decides_may_differ() {
        let shown = ["2.0 ms (4k pages, legacy) to 3.0 ms more 1.0 × met (a note,", "long) end"];
        let shown = shown.map(str::to_owned);
        assert_eq!(differs(&shown, "1 ms (2m pages) to 2 ms more – missed end"), None);
        assert!(differs(&shown, "1 ms (2m pages) to 2 ms less – missed end").is_some());
    }

    #[test]
    fn what_is_left_out_is_said() {
        assert_eq!(differs_from("Heading\n…\n ring-8  4 ns\n…"), None);
        assert_eq!(differs_from("Heading").as_deref(), Some("(and no more)"));
        assert_eq!(differs_from("…\n way time").as_deref(), Some("(and no more)"));
    }

    #[test]
    fn headings_names_and_sentences_may_not_differ() {
        for line in ["a way  times", "ring-16  1.2 ms", "A note that is short."] {
            assert_eq!(differs_from(&format!("Heading\n…\n{line}\n…")).as_deref(), Some(line));
        }
    }
}

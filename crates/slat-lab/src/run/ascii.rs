//! Text for a locale whose characters are ASCII's.

/// Characters of reports, and what stands for each.
const PLAIN: [(char, &str); 17] = [
    ('µ', "u"),
    ('±', "+-"),
    ('×', "x"),
    ('─', "-"),
    ('–', "-"),
    ('—', "-"),
    ('−', "-"),
    ('…', "..."),
    ('≥', ">="),
    ('≤', "<="),
    ('≈', "~"),
    ('→', "->"),
    ('·', "."),
    ('’', "'"),
    ('“', "\""),
    ('”', "\""),
    ('\u{a0}', " "),
];

/// Returns whether the user's locale is one of UTF-8. Where nothing is set, it is taken for one.
pub fn is_utf8() -> bool {
    let set = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set);
    locale.is_none_or(|locale| names_utf8(&locale))
}

fn names_utf8(locale: &str) -> bool {
    let locale = locale.to_ascii_lowercase();
    locale.contains("utf-8") || locale.contains("utf8")
}

/// Returns the text in ASCII. A character that is not known is `?`: one column for one.
pub fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for character in text.chars() {
        let known = PLAIN.iter().find(|(from, _)| *from == character);
        match known {
            _ if character.is_ascii() => plain.push(character),
            Some((_, to)) => plain.push_str(to),
            // The parts of a map of bars.
            None if ('\u{2580}'..='\u{259f}').contains(&character) => plain.push('#'),
            None if ('\u{2500}'..='\u{257f}').contains(&character) => plain.push('|'),
            None => plain.push('?'),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn under_a_locale_of_ascii_text_has_ascii_only() {
        assert_eq!(plain("5.8 µs ±0 % – 1 ≥ 0 █é"), "5.8 us +-0 % - 1 >= 0 #?");
        assert!(PLAIN.iter().all(|(from, to)| !from.is_ascii() && to.is_ascii()));
    }

    #[test]
    fn a_locale_names_its_characters() {
        assert!(names_utf8("de_DE.UTF-8") && names_utf8("C.utf8"));
        assert!(!names_utf8("C") && !names_utf8("POSIX") && !names_utf8("de_DE.ISO-8859-1"));
    }
}

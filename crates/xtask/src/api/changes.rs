//! Changes of a public interface: additions, and changes that break users' code.

use crate::api::listing::{BY_A_FEATURE, PRIVATE, REQUIRED};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Attribute of a type that may get more variants or fields.
const MAY_GROW: &str = "#[non_exhaustive] ";

/// The lines in which two listings differ.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Changes after which a user may have to change code: items that are gone or different, and
    /// items that users have to add.
    pub breaking: Vec<String>,
    /// Changes after which no user has to change code.
    pub additions: Vec<String>,
}

impl Changes {
    /// Returns the changes from one listing of a crate to another.
    pub fn between(old: &[String], new: &[String]) -> Self {
        let [before, after] = [old, new].map(|lines| lines.iter().collect::<BTreeSet<_>>());
        // An item that changed has the same path before and after.
        let mut by_path: BTreeMap<&str, [Vec<&str>; 2]> = BTreeMap::new();
        for line in before.difference(&after) {
            by_path.entry(path(line)).or_default()[0].push(line);
        }
        for line in after.difference(&before) {
            by_path.entry(path(line)).or_default()[1].push(line);
        }
        let mut changes = Self::default();
        for [gone, came] in by_path.into_values() {
            let mut came = came.into_iter();
            for gone in gone {
                match came.next() {
                    None => changes.breaking.push(format!("- {gone}")),
                    Some(came) => {
                        let kind = match is_compatible(gone, came) {
                            true => &mut changes.additions,
                            false => &mut changes.breaking,
                        };
                        kind.extend([format!("- {gone}"), format!("+ {came}")]);
                    }
                }
            }
            for came in came {
                match asks_of_users(came, old) {
                    true => changes.breaking.push(format!("+ {came}")),
                    false => changes.additions.push(format!("+ {came}")),
                }
            }
        }
        changes
    }

    pub fn is_empty(&self) -> bool {
        self.breaking.is_empty() && self.additions.is_empty()
    }
}

impl fmt::Display for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (title, lines) in [("Breaking", &self.breaking), ("Additions", &self.additions)] {
            if !lines.is_empty() {
                writeln!(f, "{title}:")?;
                lines.iter().try_for_each(|line| writeln!(f, "  {line}"))?;
            }
        }
        Ok(())
    }
}

/// Returns the path of the item that a line lists; for an implementation, the whole line.
fn path(line: &str) -> &str {
    if line.starts_with("impl") || line.starts_with("unsafe impl") {
        return line.trim_end_matches(BY_A_FEATURE);
    }
    // Attributes and keywords stand before the item, and contain no path.
    let item = line.find("pub ").map_or(line, |at| &line[at..]);
    let start = |at: usize| item[..at].rfind(' ').map_or(0, |space| space + 1);
    let item = item.find("::").map_or(item, |at| &item[start(at)..]);
    let bytes = item.as_bytes();
    let ends = |at: &usize| match bytes[*at] {
        b'(' | b'<' | b' ' => true,
        b':' => bytes.get(at + 1) == Some(&b' '),
        _ => false,
    };
    &item[..(0..bytes.len()).find(ends).unwrap_or(item.len())]
}

/// Returns whether users of the old item can use the new one.
fn is_compatible(old: &str, new: &str) -> bool {
    // A type that is exhaustive now, a function that is const now, a trait's item that got a
    // default, and an item that no longer needs a feature.
    old.replacen(MAY_GROW, "", 1) == new
        || old.replacen("pub fn ", "pub const fn ", 1) == new
        || old.strip_suffix(REQUIRED) == Some(new)
        || old.strip_suffix(BY_A_FEATURE) == Some(new)
}

/// Returns whether an added line requires changes of existing users: a trait's item without a
/// default, another variant to match, another field to set.
fn asks_of_users(added: &str, old: &[String]) -> bool {
    let path = path(added);
    let Some((parent, _)) = path.rsplit_once("::") else { return false };
    let mut parent = old.iter().filter(|line| self::path(line) == parent);
    let is = |line: &str, keyword: &str| line.contains(&format!("pub {keyword} "));
    let is_value = !["fn", "const", "type", "struct", "enum", "trait", "mod", "unsafe", "use"]
        .iter()
        .any(|keyword| added.contains(&format!("pub {keyword} ")));
    parent.any(|line| {
        let closed = !line.contains(MAY_GROW) && !line.contains(PRIVATE);
        let of_trait = is(line, "trait") || is(line, "unsafe trait");
        // A variant's field stands below the variant, whose line has no keyword.
        let of_type = is_value && !is(line, "mod");
        of_trait && added.contains(REQUIRED) || of_type && closed
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()).collect()
    }

    const OLD: &str = "
        pub mod a
        pub enum a::Closed
        pub a::Closed::One
        pub a::Closed::Two
        pub a::Closed::Two::size: u64
        #[non_exhaustive] pub enum a::Open
        pub a::Open::One
        pub struct a::Plain
        pub a::Plain::field: u64
        pub struct a::Opaque [private fields]
        pub a::Opaque::field: u64
        pub unsafe trait a::Trait: core::marker::Copy
        pub fn a::Trait::needed(&self) [required]
        pub fn a::Opaque::new(u64) -> Self
        pub fn a::Opaque::measured(self) -> u64 [by a feature]
        impl core::clone::Clone for a::Opaque";

    /// Returns the changes of `OLD` when one line replaces another; either may be empty.
    fn after(gone: &str, came: &str) -> Changes {
        let old = lines(OLD);
        let mut new = old.clone();
        new.retain(|line| line != gone);
        new.extend((!came.is_empty()).then(|| came.to_owned()));
        Changes::between(&old, &new)
    }

    #[test]
    fn the_same_listing_has_no_changes() {
        assert!(after("", "").is_empty());
    }

    #[test]
    fn what_is_gone_or_became_something_else_breaks() {
        for (gone, came) in [
            ("pub a::Open::One", ""),
            ("impl core::clone::Clone for a::Opaque", ""),
            ("pub fn a::Opaque::new(u64) -> Self", "pub fn a::Opaque::new(u32) -> Self"),
            ("pub enum a::Closed", "#[non_exhaustive] pub enum a::Closed"),
            ("pub struct a::Plain", "pub struct a::Plain [private fields]"),
            (
                "pub fn a::Opaque::new(u64) -> Self",
                "pub fn a::Opaque::new(u64) -> Self [by a feature]",
            ),
        ] {
            let changes = after(gone, came);
            assert!(!changes.breaking.is_empty() && changes.additions.is_empty(), "{changes}");
        }
    }

    #[test]
    fn what_users_have_to_add_breaks() {
        for came in [
            "pub a::Closed::Three",
            "pub a::Closed::Two::other: u64",
            "pub a::Plain::other: u64",
            "pub fn a::Trait::other(&self) [required]",
        ] {
            let changes = after("", came);
            assert_eq!((changes.breaking.len(), changes.additions.len()), (1, 0), "{changes}");
        }
    }

    #[test]
    fn what_is_new_or_asks_less_is_an_addition() {
        for (gone, came) in [
            ("", "pub a::Open::Two(u64)"),
            ("", "pub a::Opaque::other: u64"),
            ("", "pub fn a::Plain::new() -> Self"),
            ("", "pub fn a::Trait::other(&self)"),
            ("", "pub trait a::Other"),
            ("", "pub fn a::Other::method(&self) [required]"),
            ("", "pub struct a::Another"),
            ("", "impl core::fmt::Debug for a::Opaque"),
            ("#[non_exhaustive] pub enum a::Open", "pub enum a::Open"),
            ("pub fn a::Trait::needed(&self) [required]", "pub fn a::Trait::needed(&self)"),
            ("pub fn a::Opaque::new(u64) -> Self", "pub const fn a::Opaque::new(u64) -> Self"),
            (
                "pub fn a::Opaque::measured(self) -> u64 [by a feature]",
                "pub fn a::Opaque::measured(self) -> u64",
            ),
        ] {
            let changes = after(gone, came);
            assert!(changes.breaking.is_empty() && !changes.additions.is_empty(), "{changes}");
        }
    }

    #[test]
    fn a_path_ends_where_generics_arguments_or_a_type_begin() {
        for (line, expected) in [
            ("pub fn a::B::c<T: d::E>(&self) -> f::G", "a::B::c"),
            ("#[repr(C, align(16))] pub struct a::B", "a::B"),
            ("pub a::B::c: d::E", "a::B::c"),
            ("pub unsafe trait a::B: core::marker::Copy", "a::B"),
            ("pub mod a", "pub"),
        ] {
            assert_eq!(path(line), expected);
        }
    }
}

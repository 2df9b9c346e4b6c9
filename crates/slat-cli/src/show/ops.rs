//! Parses the operations of `slat show --do`.

use super::leaf::Rights;
use slat::{Access, Gpa, GpaRange, PageSize};
use slat_lab::size::Size;
use std::fmt;
use std::str::FromStr;

/// One operation on a guest's tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Op {
    /// The guest addresses that it changes.
    pub range: GpaRange,
    /// What it does.
    pub what: What,
    /// The operation as it was written.
    text: String,
}

/// What an operation does to a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Maps it by leaves of at most that size, which are not marked accessed.
    Map(PageSize, Rights),
    /// Unmaps it.
    Unmap,
    /// Takes away the rights to write and to execute that are not given.
    Protect(Rights),
    /// The guest accesses it, as far as it is mapped: each whole leaf is marked, and gets the
    /// right.
    Access(Access),
    /// Splits leaves that are larger.
    Split(PageSize),
    /// Collapses leaves into leaves of at most that size.
    Collapse(PageSize),
    /// Clears accessed marks.
    Age,
    /// Clears dirty marks.
    Clean,
}

const KNOWN: &str = "map:RANGE[:SIZE[:RIGHTS]], unmap:RANGE, protect:RANGE:RIGHTS, read:RANGE, \
                     write:RANGE, execute:RANGE, split:RANGE:SIZE, collapse:RANGE:SIZE, age:RANGE, \
                     clean:RANGE";

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for Op {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let fail = |why: String| format!("{why}; an operation is one of {KNOWN}");
        let mut fields = text.trim().split(':');
        let name = fields.next().unwrap_or_default();
        let range = fields.next().ok_or_else(|| fail(format!("`{text}` has no range")))?;
        let range = self::range(range)?;
        let mut next = || fields.next();
        let size = |text: Option<&str>| match text {
            None => Err(fail(format!("`{name}` needs a size"))),
            Some(text) => page_size(text),
        };
        let what = match name {
            "map" => {
                let largest = next().map_or(Ok(PageSize::SIZE_1G), page_size)?;
                What::Map(largest, next().unwrap_or("rwx").parse()?)
            }
            "unmap" => What::Unmap,
            "protect" => {
                let rights = next().ok_or_else(|| fail("`protect` needs rights".to_owned()))?;
                let rights: Rights = rights.parse()?;
                if !rights.read {
                    return Err(format!("`{text}`: what may not even be read is unmapped"));
                }
                What::Protect(rights)
            }
            "read" => What::Access(Access::Read),
            "write" => What::Access(Access::Write),
            "execute" => What::Access(Access::Execute),
            "split" => What::Split(size(next())?),
            "collapse" => What::Collapse(size(next())?),
            "age" => What::Age,
            "clean" => What::Clean,
            _ => return Err(fail(format!("`{name}` is no operation"))),
        };
        match next() {
            Some(more) => Err(fail(format!("`{text}`: `{more}` is too much"))),
            None => Ok(Self { range, what, text: text.trim().to_owned() }),
        }
    }
}

fn page_size(text: &str) -> Result<PageSize, String> {
    let size: Size = text.parse()?;
    PageSize::from_bytes(size.bytes())
        .ok_or_else(|| format!("{size} is no size of a page; write 4k, 2m or 1g"))
}

/// Parses an address: a size, or a hexadecimal number with the prefix `0x`.
fn address(text: &str) -> Result<u64, String> {
    if let Some(digits) = text.strip_prefix("0x") {
        return u64::from_str_radix(digits, 16).map_err(|error| format!("`{text}`: {error}"));
    }
    match text.trim_matches('0') {
        "" if !text.is_empty() => Ok(0),
        _ => text
            .parse::<Size>()
            .map(Size::bytes)
            .map_err(|error| format!("`{text}` is no address: {error}")),
    }
}

/// Parses a range: `START-END`, where the end is exclusive, or `START+LENGTH`.
fn range(text: &str) -> Result<GpaRange, String> {
    let (start, bytes) = if let Some((start, length)) = text.split_once('+') {
        (address(start)?, address(length)?)
    } else if let Some((start, end)) = text.split_once('-') {
        let (start, end) = (address(start)?, address(end)?);
        let bytes = end.checked_sub(start).ok_or(format!("`{text}` ends before it begins"))?;
        (start, bytes)
    } else {
        return Err(format!("`{text}` is no range; write 0-2m, or 1g+2m for 2m from 1g on"));
    };
    GpaRange::new(Gpa(start), bytes).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(text: &str) -> Op {
        text.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn operations_are_read_as_they_are_documented() {
        let all: Rights = "rwx".parse().unwrap();
        assert_eq!(op("map:0-1g").what, What::Map(PageSize::SIZE_1G, all));
        assert_eq!(op("map:0-1g:2m:rw").what, What::Map(PageSize::SIZE_2M, "rw".parse().unwrap()));
        assert_eq!(op("protect:0-4m:r").what, What::Protect("r".parse().unwrap()));
        assert_eq!(op(" split:1g+2m:4k ").what, What::Split(PageSize::SIZE_4K));
        assert_eq!(op("write:0x1000-8k").what, What::Access(Access::Write));
        for text in ["unmap:0-1g", "age:0-1g", "clean:0-1g", "read:0-1g", "collapse:0-1g:1g"] {
            assert_eq!(op(text).to_string(), text);
        }
    }

    #[test]
    fn ranges_have_an_end_or_a_length() {
        let range = |text: &str| range(text).map(|range| (range.start().0, range.size()));
        assert_eq!(range("0-1g"), Ok((0, 1 << 30)));
        assert_eq!(range("1g+2m"), Ok((1 << 30, 2 << 20)));
        assert_eq!(range("0x1000-0x3000"), Ok((4096, 8192)));
        for text in ["1g", "2m-1m", "0-0", "x-y", "0x-1", "-1g", "1g+0", ""] {
            assert!(range(text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_no_operation_is_refused_with_those_there_are() {
        for (text, word) in [
            ("mop:0-1g", "map:RANGE"),
            ("map", "no range"),
            ("map:0-1g:3m", "3m"),
            ("map:0-1g:2m:z", "rwx"),
            ("split:0-1g", "needs a size"),
            ("protect:0-1g", "needs rights"),
            ("protect:0-1g:x", "unmapped"),
            ("age:0-1g:4k", "too much"),
        ] {
            let error = text.parse::<Op>().unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}

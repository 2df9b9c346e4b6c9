//! Lists of CPUs on the command line, as the kernel writes them: `0-3,8`.

use std::str::FromStr;

/// CPUs, in the order that was given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cpus(pub Vec<usize>);

/// More than any machine has.
const MOST: usize = 1 << 16;

impl FromStr for Cpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |text: &str| text.trim().parse().ok().filter(|cpu| *cpu < MOST);
            let (first, last): (usize, usize) = (number(first)?, number(last)?);
            (first <= last).then_some(first..=last)
        };
        let ranges: Option<Vec<_>> = text.split(',').map(range).collect();
        match ranges {
            Some(ranges) => Ok(Self(ranges.into_iter().flatten().collect())),
            None => Err(format!("`{text}` is no list of CPUs; write it as 0-3,8")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_cpus_and_ranges_in_the_order_given() {
        assert_eq!("3,0-2".parse(), Ok(Cpus(vec![3, 0, 1, 2])));
        assert_eq!("7".parse(), Ok(Cpus(vec![7])));
        for text in ["", "1,", "2-1", "a", "1-", "0-99999999"] {
            assert!(text.parse::<Cpus>().unwrap_err().contains("0-3,8"), "{text}");
        }
    }
}

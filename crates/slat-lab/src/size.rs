//! Sizes as people write them: `64G`, `2m`, `64GiB`; every unit is a power of 1024.

use std::fmt;
use std::str::FromStr;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Size(pub u64);

const UNITS: [(char, u32); 4] = [('t', 40), ('g', 30), ('m', 20), ('k', 10)];

impl Size {
    /// The size in bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bytes = parse_size::Config::new()
            .with_binary()
            .parse_size(text)
            .map_err(|error| format!("{error}; write a size as 4k, 2m, 1g or 64G"))?;
        if bytes == 0 {
            return Err("a size of zero measures nothing; write it as 4k, 2m, 1g or 64G".into());
        }
        Ok(Self(bytes))
    }
}

/// Prints the largest unit that leaves a whole number: `2m`, `64g`, `1536m`.
impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole =
            |&&(_, shift): &&(char, u32)| self.0 >> shift != 0 && self.0.trailing_zeros() >= shift;
        match UNITS.iter().find(whole) {
            Some((unit, shift)) => f.pad(&format!("{}{unit}", self.0 >> shift)),
            None => f.pad(&self.0.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_is_binary_whichever_way_it_is_written() {
        for text in ["64G", "64g", "64GiB", "64GB", "64 gib", "65536M"] {
            assert_eq!(text.parse(), Ok(Size(64 << 30)), "{text}");
        }
        assert_eq!("4096".parse(), Ok(Size(4096)));
        assert_eq!("1.5g".parse(), Ok(Size(1536 << 20)));
    }

    #[test]
    fn a_size_prints_in_its_largest_whole_unit() {
        for text in ["4k", "2m", "1g", "1t", "1536m", "4097"] {
            assert_eq!(text.parse::<Size>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn zero_and_nonsense_sizes_are_refused_with_an_example() {
        for text in ["0", "", "big", "4x", "-1g", "99999999999g"] {
            let error = text.parse::<Size>().unwrap_err();
            assert!(error.contains("4k, 2m"), "{text}: {error}");
        }
    }
}

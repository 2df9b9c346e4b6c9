//! Bytes per second, parsed and printed.

use crate::size::Size;
use std::fmt;
use std::str::FromStr;

/// Bytes per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate(pub f64);

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is no rate; write it as 500MiB/s, 1GiB/s or 10Gbit/s");
        let amount = text.strip_suffix("/s").ok_or_else(wrong)?;
        let bits = ["Tbit", "Gbit", "Mbit", "kbit"].into_iter().zip([1e12, 1e9, 1e6, 1e3]);
        let mut bits = bits.filter_map(|(unit, factor)| Some((amount.strip_suffix(unit)?, factor)));
        let rate = match bits.next() {
            Some((number, factor)) => {
                number.trim().parse::<f64>().map_err(|_| wrong())? * factor / 8.0
            }
            None => amount.parse::<Size>().map_err(|_| wrong())?.bytes() as f64,
        };
        if rate.is_finite() && rate >= 1.0 { Ok(Self(rate)) } else { Err(wrong()) }
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{:.0} MiB/s", self.0 / f64::from(1 << 20)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_read_in_bytes_and_in_bits() {
        assert_eq!("500MiB/s".parse::<Rate>().unwrap().0, 500.0 * 1_048_576.0);
        assert_eq!("10Gbit/s".parse::<Rate>().unwrap().0, 1.25e9);
        assert_eq!("1.5 Mbit/s".parse::<Rate>().unwrap().0, 187_500.0);
        for text in ["500MiB", "0/s", "fast/s", "-1Gbit/s", "/s", "Gbit/s", "1e999Gbit/s"] {
            let error = text.parse::<Rate>().unwrap_err();
            assert!(error.contains("500MiB/s"), "{text}: {error}");
        }
    }
}

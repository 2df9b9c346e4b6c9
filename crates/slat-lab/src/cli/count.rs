//! Counts on the command line, with the bounds that all scenarios share.

use clap::{builder::RangedI64ValueParser, value_parser};

/// Parser of the number of guests, or turns of each variant, that are measured: 1 to 1,000.
pub fn rounds() -> RangedI64ValueParser<u32> {
    value_parser!(u32).range(1..=1000)
}

/// Parser of the number of rounds of work in one guest: 1 to 10,000.
pub fn iterations() -> RangedI64ValueParser<u32> {
    value_parser!(u32).range(1..=10_000)
}

/// Parser of the number of vCPUs of a guest of the engine, each of which is a thread: 1 to 192.
pub fn threads() -> RangedI64ValueParser<u16> {
    value_parser!(u16).range(1..=192)
}

/// Parser of the number of vCPUs of a guest under KVM: 1 to 512.
pub fn vcpus() -> RangedI64ValueParser<u32> {
    value_parser!(u32).range(1..=512)
}

/// Parser of a whole number of per cent: 1 to 100.
pub fn of_hundred() -> RangedI64ValueParser<u8> {
    value_parser!(u8).range(1..=100)
}

/// Parses a percentage, with or without the sign: 0.1 to 1,000.
///
/// # Errors
/// The text is no number, or the number is out of bounds.
pub fn percent(text: &str) -> Result<f64, String> {
    let number = text.trim().trim_end_matches('%').trim_end().parse::<f64>().ok();
    let within = number.filter(|number| (0.1..=1000.0).contains(number));
    within.ok_or_else(|| format!("`{text}` is no percentage from 0.1 to 1000; write it as 5"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Command, builder::TypedValueParser};
    use std::ffi::OsStr;

    /// Returns which of the values the parser accepts.
    fn taken<P: TypedValueParser>(parser: &P, values: [&str; 4]) -> [bool; 4] {
        values.map(|it| parser.parse_ref(&Command::new("test"), None, OsStr::new(it)).is_ok())
    }

    #[test]
    fn both_bounds_are_taken_and_what_is_beyond_them_is_refused() {
        let inner = [false, true, true, false];
        assert_eq!(taken(&rounds(), ["0", "1", "1000", "1001"]), inner);
        assert_eq!(taken(&iterations(), ["0", "1", "10000", "10001"]), inner);
        assert_eq!(taken(&threads(), ["0", "1", "192", "193"]), inner);
        assert_eq!(taken(&vcpus(), ["0", "1", "512", "513"]), inner);
        assert!(["", "x", "0", "-5", "1001", "NaN"].iter().all(|text| percent(text).is_err()));
        assert_eq!((percent("2.5"), percent("10 %")), (Ok(2.5), Ok(10.0)));
        assert_eq!(taken(&of_hundred(), ["0", "1", "100", "101"]), inner);
    }
}

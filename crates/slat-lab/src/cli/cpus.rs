//! Lists of CPUs on the command line, as the kernel writes them: `0-3,8`.

use std::str::FromStr;

/// CPUs, in the order that was given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cpus(pub Vec<usize>);

impl FromStr for Cpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let cpus = slat_kvm::procfs::list(text).map(Self);
        cpus.ok_or_else(|| format!("`{text}` is no list of CPUs; write it as 0-3,8"))
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

//! The command line.

use std::path::PathBuf;

/// The usage that is printed.
pub const USAGE: &str = "\
usage: work write MIB [SECONDS]      write stamps to memory, and check each before it goes
       work crew MIB [SECONDS]       the same on all CPUs, in an order that a copy must have kept
       work private MIB              have pages made private and shared on all CPUs, and check both
       work touch MIB                read memory, page after page, until the hypervisor says stop
       work execute MIB              call every page of memory, twice
       work kexec IMAGE CMDLINE [INITRD]    start another kernel in place of this one
       work poke ADDRESS [VALUE]     read or write 4 bytes of physical memory that is not RAM

Without the hypervisor, whatever waits for its stop goes on for SECONDS, or 3.";

/// A job of the program.
#[derive(Debug, PartialEq, Eq)]
pub enum Job {
    /// Print the usage.
    Help,
    /// Write stamps to memory and check them.
    Write { mib: usize, seconds: Option<u64> },
    /// Write and check stamps on all CPUs.
    Crew { mib: usize, seconds: Option<u64> },
    /// Convert pages to private and back, and check them.
    Private { mib: usize },
    /// Read memory page after page.
    Touch { mib: usize },
    /// Call code in every page of memory.
    Execute { mib: usize },
    /// Start another kernel.
    Kexec { image: PathBuf, cmdline: String, initrd: Option<PathBuf> },
    /// Read or write 4 bytes at a physical address.
    Poke { address: u64, value: Option<u32> },
}

impl Job {
    /// Returns the job that the arguments name.
    ///
    /// # Errors
    /// Returns in words why the arguments name no job.
    pub fn parse(arguments: &[String]) -> Result<Self, String> {
        let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
        match words[..] {
            ["-h" | "--help"] => Ok(Self::Help),
            ["write", mib] => Ok(Self::Write { mib: size(mib)?, seconds: None }),
            ["write", mib, seconds] => {
                Ok(Self::Write { mib: size(mib)?, seconds: Some(number("SECONDS", seconds)?) })
            }
            ["crew", mib] => Ok(Self::Crew { mib: size(mib)?, seconds: None }),
            ["crew", mib, seconds] => {
                Ok(Self::Crew { mib: size(mib)?, seconds: Some(number("SECONDS", seconds)?) })
            }
            ["private", mib] => Ok(Self::Private { mib: size(mib)? }),
            ["touch", mib] => Ok(Self::Touch { mib: size(mib)? }),
            ["execute", mib] => Ok(Self::Execute { mib: size(mib)? }),
            ["kexec", image, cmdline] => {
                Ok(Self::Kexec { image: image.into(), cmdline: cmdline.into(), initrd: None })
            }
            ["kexec", image, cmdline, initrd] => Ok(Self::Kexec {
                image: image.into(),
                cmdline: cmdline.into(),
                initrd: Some(initrd.into()),
            }),
            ["poke", at] => Ok(Self::Poke { address: address(at)?, value: None }),
            ["poke", at, value] => {
                let value = number("VALUE", value)?;
                let value = u32::try_from(value).map_err(|_| "VALUE has 32 bits".to_owned())?;
                Ok(Self::Poke { address: address(at)?, value: Some(value) })
            }
            [] => Err("there is nothing to do".into()),
            [
                name @ ("write" | "crew" | "private" | "touch" | "execute" | "kexec" | "poke"),
                ..,
            ] => Err(format!("{name} takes other arguments")),
            [name, ..] => Err(format!("{name} is no work")),
        }
    }
}

/// Parses a size in MiB.
fn size(text: &str) -> Result<usize, String> {
    let mib = number("MIB", text)?;
    // Stamps and registers have 32 bits for page numbers and counts of pages.
    match usize::try_from(mib) {
        Ok(mib) if (1..1 << 24).contains(&mib) => Ok(mib),
        _ => Err(format!("MIB is from 1 to {}, not {mib}", (1 << 24) - 1)),
    }
}

fn address(text: &str) -> Result<u64, String> {
    let address = number("ADDRESS", text)?;
    match address % 4 {
        0 => Ok(address),
        _ => Err(format!("ADDRESS {address:#x} is no multiple of 4")),
    }
}

/// Parses a number, which is hexadecimal after `0x`.
fn number(name: &str, text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| format!("{name} is a number, not {text:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Job, String> {
        Job::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn each_work_is_parsed() {
        assert_eq!(parse("write 8"), Ok(Job::Write { mib: 8, seconds: None }));
        assert_eq!(parse("write 8 2"), Ok(Job::Write { mib: 8, seconds: Some(2) }));
        assert_eq!(parse("crew 8"), Ok(Job::Crew { mib: 8, seconds: None }));
        assert_eq!(parse("private 8"), Ok(Job::Private { mib: 8 }));
        assert_eq!(parse("touch 1"), Ok(Job::Touch { mib: 1 }));
        assert_eq!(parse("execute 1"), Ok(Job::Execute { mib: 1 }));
        let (image, cmdline) = ("Image".into(), "quiet".to_owned());
        let second = Job::Kexec { image, cmdline, initrd: Some("initrd".into()) };
        assert_eq!(parse("kexec Image quiet initrd"), Ok(second));
        assert_eq!(parse("poke 0xb000004"), Ok(Job::Poke { address: 0xb00_0004, value: None }));
        assert_eq!(parse("poke 8 0xff"), Ok(Job::Poke { address: 8, value: Some(255) }));
        assert_eq!(parse("--help"), Ok(Job::Help));
    }

    #[test]
    fn what_is_no_work_is_refused_with_the_reason() {
        for (line, reason) in [
            ("", "nothing to do"),
            ("dance", "dance is no work"),
            ("write", "write takes other arguments"),
            ("write 0", "not 0"),
            ("write 99999999", "16777215"),
            ("kexec Image", "kexec takes other arguments"),
            ("touch lots", "not \"lots\""),
            ("poke 2", "no multiple of 4"),
            ("poke 4 0x100000000", "32 bits"),
        ] {
            let refusal = parse(line).unwrap_err();
            assert!(refusal.contains(reason), "{line}: {refusal}");
        }
    }
}

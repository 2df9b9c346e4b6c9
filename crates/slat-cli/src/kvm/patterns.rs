//! Recorded orders in which guests touched their memory after they were resumed.
//!
//! Those that ship are of Linux 6.12 with 128 MiB that QEMU resumed by post-copy: each page that a
//! vCPU had to wait for, in the order of its faults (QEMU's trace of
//! `postcopy_ram_fault_thread_request`), for its first pages. A file may be such a trace, too.

use std::fmt;
use std::str::FromStr;

/// The recorded orders that come with the program.
const SHIPPED: [(&str, &str); 3] = [
    ("idle", include_str!("../../patterns/idle.txt")),
    ("requests", include_str!("../../patterns/requests.txt")),
    ("script", include_str!("../../patterns/script.txt")),
];

/// Bytes of a page.
const PAGE: u64 = 4096;

/// A recorded order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recording {
    name: String,
    /// The pages, which stay for the life of the process: a guest's work refers to them.
    pub pages: &'static [u64],
}

impl FromStr for Recording {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let read;
        let text = match SHIPPED.iter().find(|(shipped, _)| *shipped == name) {
            Some((_, text)) => *text,
            None => {
                read = std::fs::read_to_string(name).map_err(|error| {
                    let names = SHIPPED.map(|(name, _)| name).join(", ");
                    format!(
                        "no order of that name ({names}), and no file that can be read: {error}"
                    )
                })?;
                &read
            }
        };
        let pages = pages(text)?;
        Ok(Self { name: name.to_owned(), pages: pages.leak() })
    }
}

impl fmt::Display for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// Reads the pages: their numbers, with `w` in front of one that was written, or lines of QEMU's
/// trace. Lines that begin with `#` are notes.
fn pages(text: &str) -> Result<Vec<u64>, String> {
    let mut pages = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let wrong = || format!("line {number} has no page: `{line}`");
        if let Some((before, rest)) = line.split_once("offset=0x") {
            // Of a machine's other memories, such as its graphics', there is no guest here.
            if before.contains("rb=pc.ram") || before.contains("rb=mach-virt.ram") {
                let digits = rest.split_whitespace().next().unwrap_or(rest);
                pages.push(u64::from_str_radix(digits, 16).map_err(|_| wrong())? / PAGE);
            }
        } else {
            let mut words = line.split_whitespace();
            while let Some(word) = words.next() {
                let page = match word.strip_prefix('w') {
                    Some("") => words.next().ok_or_else(wrong)?,
                    written => written.unwrap_or(word),
                };
                pages.push(page.parse().map_err(|_| wrong())?);
            }
        }
    }
    if pages.is_empty() { Err("it has no page".to_owned()) } else { Ok(pages) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_numbers_or_a_trace_and_those_that_ship_are_read() {
        let trace = "postcopy_ram_fault_thread_request Request for HVA=0x7f rb=pc.ram \
                     offset=0x3000 pid=7\nx Request rb=vga.vram offset=0x0 pid=7\n";
        assert_eq!(pages(trace).unwrap(), [3]);
        assert_eq!(pages("# note\n7\nw 8 9 w10\n").unwrap(), [7, 8, 9, 10]);
        for broken in ["1\nx\n", "1\n8 w\n", "1\nw w 8\n"] {
            assert!(pages(broken).unwrap_err().contains("line 2"), "{broken}");
        }
        assert!(pages("# nothing\n").is_err());
        for (name, _) in SHIPPED {
            let recorded: Recording = name.parse().unwrap();
            assert!(recorded.pages.len() > 100, "{name}");
            assert!(recorded.pages.iter().all(|page| page * PAGE < 128 << 20), "{name}");
        }
        assert!("/nonexistent".parse::<Recording>().unwrap_err().contains("requests"));
    }
}

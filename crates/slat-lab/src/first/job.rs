//! What is said to the first process of the machine, and what it answers.
//!
//! The answer comes over a serial line that is its alone, and is framed all the same: a machine
//! that ends in the middle of it must not look like one that reported less.

use serde::{Deserialize, Serialize};

/// Where the first process finds its job.
pub const PATH: &str = "/job.json";

/// What the first process is to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// Modules to load, in that order.
    pub modules: Vec<LoadModule>,
    /// The words after the program; none if there are tests.
    pub command: Vec<String>,
    /// Programs to run one after the other.
    #[serde(default)]
    pub tests: Vec<Test>,
    /// The serial line to answer on.
    pub port: String,
}

/// A program to run for what it says and how it ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Test {
    /// Its file.
    pub path: String,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Seconds after which it is ended.
    pub seconds: u32,
}

/// What came of such a program.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Tested {
    /// Its exit code; nothing if a signal, or its time, ended it.
    pub exit_code: Option<i32>,
    /// Whether its time ended it.
    pub timed_out: bool,
    /// How long it took.
    pub seconds: f64,
    /// The end of what it said.
    pub output: String,
}

/// A module to load.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadModule {
    /// Its name, with `_`.
    pub name: String,
    /// Its file.
    pub path: String,
    /// Its parameters: name and value.
    pub params: Vec<(String, String)>,
}

/// What the first process answers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// Why the command could not be run, if so.
    pub error: Option<String>,
    /// How the command ended; nothing if a signal ended it.
    pub exit_code: Option<i32>,
    /// What it said on stderr.
    pub stderr: String,
    /// Its results.json.
    pub report: Option<String>,
    /// What came of each test.
    #[serde(default)]
    pub tests: Vec<Tested>,
}

const MAGIC: &[u8] = b"slat-answer ";
/// Length and checksum, eight hexadecimal digits each, with a space and a line's end.
const SIZES: usize = 18;

/// An answer as it is sent.
///
/// # Errors
/// None in practice: it is JSON in memory.
pub fn encode(answer: &Answer) -> serde_json::Result<Vec<u8>> {
    let body = serde_json::to_vec(answer)?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend(format!("{:08x} {:08x}\n", body.len(), crc32fast::hash(&body)).bytes());
    bytes.extend(body);
    Ok(bytes)
}

/// What has arrived so far.
#[derive(Clone, Debug, PartialEq)]
pub enum Arrived {
    /// Nothing of an answer.
    Nothing,
    /// This many bytes of so many.
    Part(usize, usize),
    /// All of it, and its checksum is right.
    All(Box<Answer>),
    /// All of it, and it is not what was sent.
    Damaged,
}

/// Looks for an answer in what came over the line.
pub fn decode(bytes: &[u8]) -> Arrived {
    let Some(start) = bytes.windows(MAGIC.len()).position(|window| window == MAGIC) else {
        return Arrived::Nothing;
    };
    let rest = &bytes[start + MAGIC.len()..];
    let Some((sizes, body)) = rest.split_at_checked(SIZES) else { return Arrived::Part(0, 0) };
    let number = |digits: &[u8]| {
        let digits = std::str::from_utf8(digits).ok()?;
        u32::from_str_radix(digits, 16).ok()
    };
    let (Some(length), Some(sum)) = (number(&sizes[..8]), number(&sizes[9..17])) else {
        return Arrived::Damaged;
    };
    let length = length as usize;
    let Some(body) = body.get(..length) else { return Arrived::Part(body.len(), length) };
    match serde_json::from_slice(body) {
        Ok(answer) if crc32fast::hash(body) == sum => Arrived::All(Box::new(answer)),
        _ => Arrived::Damaged,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer() -> Answer {
        Answer {
            exit_code: Some(0),
            stderr: "line\n".to_owned(),
            report: Some("{\"schema\": 1}\n".to_owned()),
            error: None,
            tests: Vec::new(),
        }
    }

    #[test]
    fn an_answer_arrives_whole_whatever_the_line_said_before() {
        let mut line = b"noise\r\n".to_vec();
        line.extend(encode(&answer()).unwrap());
        line.extend(b"more");
        assert_eq!(decode(&line), Arrived::All(Box::new(answer())));
    }

    #[test]
    fn an_answer_that_breaks_off_is_a_part_at_every_byte() {
        let whole = encode(&answer()).unwrap();
        for end in MAGIC.len()..whole.len() {
            assert!(matches!(decode(&whole[..end]), Arrived::Part(..)), "{end}");
        }
        assert_eq!(decode(&whole[..MAGIC.len() - 1]), Arrived::Nothing);
    }

    #[test]
    fn a_byte_that_changed_on_the_way_is_noticed() {
        let whole = encode(&answer()).unwrap();
        for place in MAGIC.len()..whole.len() {
            let mut line = whole.clone();
            line[place] ^= 1;
            // A space or a line's end between the numbers carries nothing.
            let carries = ![MAGIC.len() + 8, MAGIC.len() + 17].contains(&place);
            assert!(!carries || !matches!(decode(&line), Arrived::All(_)), "{place}");
        }
    }
}

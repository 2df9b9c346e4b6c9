//! The job of the first process of the machine, and its answer.
//!
//! The answer comes over its own serial line, in a frame with length and checksum: an answer that
//! breaks off must not look like a shorter one.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Path of the file from which the first process reads its job.
pub const PATH: &str = "/job.json";

/// The job of the first process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// Modules to load, in this order.
    pub modules: Vec<LoadModule>,
    /// The words of the command after the program's name; empty if there are tests.
    pub command: Vec<String>,
    /// Programs to run one after the other.
    pub tests: Vec<Test>,
    /// Files to read when all tests have ended, such as counters of a kernel module.
    pub read: Vec<String>,
    /// The serial line to answer on.
    pub port: String,
    /// Seconds from the answer to the end of the machine.
    pub linger: u32,
}

impl Job {
    /// Returns the tests for a first process that reads no JSON: the serial line, and each test in
    /// a line of its own, its words with tabs between them.
    pub fn lines(&self) -> String {
        let mut lines = self.port.clone() + "\n";
        for Test { path, arguments, seconds } in &self.tests {
            let words = [seconds.to_string(), path.clone()];
            let words: Vec<String> = words.into_iter().chain(arguments.iter().cloned()).collect();
            lines += &(words.join("\t") + "\n");
        }
        lines
    }
}

/// A test program, of which the output and the exit code are returned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Test {
    /// Path of the program.
    pub path: String,
    /// Arguments of the program.
    pub arguments: Vec<String>,
    /// Time limit, in seconds.
    pub seconds: u32,
}

/// The result of a test program.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TestResult {
    /// Exit code; `None` if a signal or the time limit ended the test.
    pub exit_code: Option<i32>,
    /// Whether the time limit ended the test.
    pub timed_out: bool,
    /// Duration, in seconds.
    pub seconds: f64,
    /// The end of the output.
    pub output: String,
}

/// A module to load.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadModule {
    /// Name of the module, with `_`.
    pub name: String,
    /// Path of the module.
    pub path: String,
    /// Names and values of its parameters.
    pub params: Vec<(String, String)>,
}

/// The answer of the first process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// The reason why the command could not be run, if it could not.
    pub error: Option<String>,
    /// The exit code of the command; `None` if a signal ended it.
    pub exit_code: Option<i32>,
    /// The command's output on stderr.
    pub stderr: String,
    /// The command's results.json.
    pub report: Option<String>,
    /// The result of each test.
    #[serde(default)]
    pub tests: Vec<TestResult>,
    /// The text of each file of [`Job::read`] that is there.
    #[serde(default)]
    pub read: BTreeMap<String, String>,
}

const MAGIC: &[u8] = b"slat-answer ";
/// Length of the frame's header: length and checksum, in eight hexadecimal digits each, a space and
/// an end of line.
const SIZES: usize = 18;

/// Encodes an answer for the serial line.
///
/// # Errors
/// None in practice, because it writes JSON to memory.
pub fn encode(answer: &Answer) -> serde_json::Result<Vec<u8>> {
    let body = serde_json::to_vec(answer)?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend(format!("{:08x} {:08x}\n", body.len(), crc32fast::hash(&body)).bytes());
    bytes.extend(body);
    Ok(bytes)
}

/// The part of an answer that has arrived.
#[derive(Clone, Debug, PartialEq)]
pub enum AnswerPart {
    /// No part of an answer.
    Nothing,
    /// A part of an answer: the bytes that have arrived, and the bytes of the whole answer.
    Part(usize, usize),
    /// The whole answer, with a correct checksum.
    All(Box<Answer>),
    /// The whole answer, with an error in it.
    Damaged,
}

/// Looks for an answer in the bytes from the serial line.
pub fn decode(bytes: &[u8]) -> AnswerPart {
    let Some(start) = bytes.windows(MAGIC.len()).position(|window| window == MAGIC) else {
        return AnswerPart::Nothing;
    };
    let rest = &bytes[start + MAGIC.len()..];
    let Some((sizes, body)) = rest.split_at_checked(SIZES) else { return AnswerPart::Part(0, 0) };
    let number = |digits: &[u8]| {
        let digits = std::str::from_utf8(digits).ok()?;
        u32::from_str_radix(digits, 16).ok()
    };
    let (Some(length), Some(sum)) = (number(&sizes[..8]), number(&sizes[9..17])) else {
        return AnswerPart::Damaged;
    };
    let length = length as usize;
    let Some(body) = body.get(..length) else { return AnswerPart::Part(body.len(), length) };
    match serde_json::from_slice(body) {
        Ok(answer) if crc32fast::hash(body) == sum => AnswerPart::All(Box::new(answer)),
        _ => AnswerPart::Damaged,
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
            read: BTreeMap::new(),
            tests: Vec::new(),
        }
    }

    #[test]
    fn an_answer_arrives_whole_whatever_preceded_it_on_the_line() {
        let mut line = b"noise\r\n".to_vec();
        line.extend(encode(&answer()).unwrap());
        line.extend(b"more");
        assert_eq!(decode(&line), AnswerPart::All(Box::new(answer())));
    }

    #[test]
    fn a_job_without_json_has_a_test_in_each_line() {
        let test = |path: &str, words: &[&str]| Test {
            path: path.to_owned(),
            arguments: words.iter().map(|&word| word.to_owned()).collect(),
            seconds: 9,
        };
        let job = Job {
            modules: Vec::new(),
            command: Vec::new(),
            tests: vec![test("/slat", &["guest", "-p", "4"]), test("/other", &[])],
            read: Vec::new(),
            port: "/dev/hvc1".to_owned(),
            linger: 0,
        };
        assert_eq!(job.lines(), "/dev/hvc1\n9\t/slat\tguest\t-p\t4\n9\t/other\n");
    }

    #[test]
    fn an_answer_that_breaks_off_is_a_part_at_every_byte() {
        let whole = encode(&answer()).unwrap();
        for end in MAGIC.len()..whole.len() {
            assert!(matches!(decode(&whole[..end]), AnswerPart::Part(..)), "{end}");
        }
        assert_eq!(decode(&whole[..MAGIC.len() - 1]), AnswerPart::Nothing);
    }

    #[test]
    fn a_byte_that_changed_on_the_way_is_noticed() {
        let whole = encode(&answer()).unwrap();
        for place in MAGIC.len()..whole.len() {
            let mut line = whole.clone();
            line[place] ^= 1;
            // Changes of the space or the end of line in the header have no effect.
            let carries = ![MAGIC.len() + 8, MAGIC.len() + 17].contains(&place);
            assert!(!carries || !matches!(decode(&line), AnswerPart::All(_)), "{place}");
        }
    }
}

//! How often guests are run: as often as was asked for, or until what they answer is known closely.

use serde_json::Value;
use slat_lab::first::is_timeless;
use slat_lab::record::Repeated;
use slat_lab::session::Session;
use slat_lab::stats::median_precision;
use slat_lab::turns::order;
use std::str::FromStr;
use std::time::{Duration, Instant};

/// Runs where no time means anything and nobody says how many.
const UNTIMED: Times = Times { least: 3, most: 3 };

/// The most runs of a guest.
const MOST: u32 = 1000;

/// How many runs count: at least, and at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    least: u32,
    most: u32,
}

impl Times {
    /// One.
    pub const ONCE: Self = Self::exactly(1);

    /// That many.
    pub const fn exactly(runs: u32) -> Self {
        Self { least: runs, most: runs }
    }

    fn is_range(self) -> bool {
        self.least < self.most
    }
}

impl FromStr for Times {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (least, most) = text.split_once('-').unwrap_or((text, text));
        let both = least.trim().parse().ok().zip(most.trim().parse().ok());
        let within = both.filter(|&(least, most)| 1 <= least && least <= most && most <= MOST);
        let (least, most) = within.ok_or_else(|| {
            format!("`{text}` is no number from 1 to {MOST} and no range of such; write 5 or 6-12")
        })?;
        Ok(Self { least, most })
    }
}

/// How often guests are run, and what for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Repeat {
    times: Times,
    /// How narrow the interval of the answer is to be: ± per cent of the median.
    percent: f64,
}

/// A guest that can be run any number of times.
pub trait Repeatable {
    /// What it is, for the person waiting.
    fn name(&self) -> String;

    /// Runs it once; the first time warms the host's memory up.
    ///
    /// # Errors
    /// What the host lacks, or a guest or a log that went wrong.
    fn run(&mut self, session: &Session) -> anyhow::Result<()>;

    /// What it is run for, by its variant: a sample for each run that counts.
    fn answer(&self) -> (String, &[f64]);
}

impl Repeat {
    /// So many times, until the answer is known to so many per cent.
    pub fn new(times: Times, percent: f64) -> Self {
        let untimed = times.is_range() && is_timeless();
        Self { times: if untimed { UNTIMED } else { times }, percent }
    }

    /// Runs of each guest at most, the one that warms up included.
    pub fn steps(&self) -> u64 {
        u64::from(self.times.most) + 1
    }

    /// The parameter `runs` of results: what was asked for, not what came of it.
    pub fn param(&self) -> Value {
        let Times { least, most } = self.times;
        if least == most { least.into() } else { format!("{least}-{most}").into() }
    }

    /// Runs guests in turns: once to warm up, as often as was asked for, and then until the answer
    /// of each is narrow enough, there are no more runs, or the time that is left is too short for
    /// another turn. Ctrl-C ends it anywhere.
    ///
    /// # Errors
    /// Those of a guest.
    pub fn run<G: Repeatable>(
        &self,
        guests: &mut [&mut G],
        session: &mut Session,
    ) -> anyhow::Result<()> {
        let mut longest = Duration::ZERO;
        for turn in 0..=self.times.most {
            if turn > self.times.least && (self.is_reached(guests) || no_time(session, longest)) {
                break;
            }
            let begin = Instant::now();
            for place in order(turn as usize, guests.len()) {
                if !session.interrupted() {
                    guests[place].run(session)?;
                }
            }
            longest = longest.max(begin.elapsed());
        }
        if self.times.is_range() {
            for guest in guests {
                let (variant, answers) = guest.answer();
                session.repeat(Repeated::new(guest.name(), variant, answers, self.percent));
            }
        }
        Ok(())
    }

    fn is_reached<G: Repeatable>(&self, guests: &[&mut G]) -> bool {
        let precision = |guest: &&mut G| median_precision(guest.answer().1);
        let mut all = guests.iter().map(precision);
        all.all(|part| part.is_some_and(|part| part * 100.0 <= self.percent))
    }
}

/// Whether a time limit would end a turn that takes as long as the longest did.
fn no_time(session: &Session, longest: Duration) -> bool {
    session.interrupted() || session.left().is_some_and(|left| left < longest + longest / 4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kvm::populate::Populate;

    /// A guest whose answers are known beforehand.
    struct Known {
        answers: Vec<f64>,
        runs: usize,
    }

    impl Repeatable for Known {
        fn name(&self) -> String {
            "known".to_owned()
        }

        fn run(&mut self, _: &Session) -> anyhow::Result<()> {
            self.runs += 1;
            Ok(())
        }

        fn answer(&self) -> (String, &[f64]) {
            // The first run warms up.
            ("dirty".to_owned(), &self.answers[..self.runs.saturating_sub(1)])
        }
    }

    fn repeat(options: &str) -> Repeat {
        slat_lab::scenario::settings::<Populate>(options).unwrap().run.repeat()
    }

    #[test]
    fn a_number_of_runs_is_that_number_and_a_range_goes_on() {
        assert_eq!(repeat("").param(), "6-12");
        assert_eq!(repeat("-r 4").param(), 4);
        assert_eq!(repeat("--runs 4-9 --until 5%").percent, 5.0);
        for wrong in ["", "0", "x", "5-4", "1-1001", "-", "6-"] {
            assert!(wrong.parse::<Times>().unwrap_err().contains("6-12"), "{wrong}");
        }
    }

    #[test]
    fn runs_go_on_until_all_guests_are_narrow_or_there_are_no_more() {
        let guest = |last: f64| {
            let mut answers = vec![1.0; 100];
            (answers[0], answers[1]) = (last, last);
            Known { answers, runs: 0 }
        };
        let (mut quiet, mut noisy) = (guest(1.0), guest(2.0));
        let mut session = Session::quiet();
        repeat("").run(&mut [&mut quiet], &mut session).unwrap();
        assert_eq!(quiet.runs, 7, "one warms up");
        repeat("").run(&mut [&mut guest(1.0), &mut noisy], &mut session).unwrap();
        // Two samples of twelve are left out at either end, and two were far off.
        assert_eq!(noisy.runs, 13);
        let reached: Vec<_> = session.repeated().iter().map(|it| (it.runs, it.reached)).collect();
        assert_eq!(reached, [(6, true), (12, true), (12, true)]);
        repeat("--runs 3").run(&mut [&mut guest(1.0)], &mut session).unwrap();
        assert_eq!(session.repeated().len(), 3, "nothing is said where nothing was repeated");
    }

    #[test]
    fn a_time_limit_leaves_out_the_turn_that_would_not_fit() {
        struct Slow(Known);
        impl Repeatable for Slow {
            fn name(&self) -> String {
                self.0.name()
            }
            fn run(&mut self, session: &Session) -> anyhow::Result<()> {
                std::thread::sleep(Duration::from_millis(20));
                self.0.run(session)
            }
            fn answer(&self) -> (String, &[f64]) {
                self.0.answer()
            }
        }
        let answers = (0..100).map(f64::from).collect();
        let mut slow = Slow(Known { answers, runs: 0 });
        let mut session = Session::quiet();
        session.limit(Duration::from_millis(600));
        repeat("--runs 6-60 --until 1").run(&mut [&mut slow], &mut session).unwrap();
        assert!(!session.interrupted() && slow.0.runs < 61, "{} runs", slow.0.runs);
        assert!(!session.repeated()[0].reached);
    }
}

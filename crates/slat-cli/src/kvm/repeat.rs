//! Repeats the runs of guests: a fixed number of times, or until the interval of the answer is
//! narrow enough.

use serde_json::Value;
use slat_lab::first::is_timeless;
use slat_lab::record::Repetition;
use slat_lab::session::Session;
use slat_lab::stats::median_precision;
use slat_lab::turns::order;
use std::str::FromStr;
use std::time::{Duration, Instant};

/// Number of runs in an emulated machine, whose times mean nothing, if a range is asked for.
const UNTIMED: Times = Times { least: 3, most: 3 };

/// Largest number of runs that can be asked for.
const MOST: u32 = 1000;

/// The least and the largest number of runs that are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    least: u32,
    most: u32,
}

impl Times {
    /// One run.
    pub const ONCE: Self = Self::exactly(1);

    /// Returns a fixed number of runs.
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

/// How often guests are run, and how precise the answer is to be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Repeat {
    times: Times,
    /// Half the width of the interval that the answer is to have at most, in per cent of the
    /// median.
    percent: f64,
}

/// A guest that can be run any number of times.
pub trait Repeatable {
    /// Returns the name that is shown while it runs.
    fn name(&self) -> String;

    /// Runs the guest once; the first run warms the host's memory up.
    ///
    /// # Errors
    /// Returns an error if the host lacks something, or if a guest or a log is wrong.
    fn run(&mut self, session: &Session) -> anyhow::Result<()>;

    /// Returns the variant of the figure that the guest is run for, and a sample for each run that
    /// counts.
    fn answer(&self) -> (String, &[f64]);
}

impl Repeat {
    /// Repeats runs `times` times; within a range, until the interval of the answer is within ±
    /// `percent` per cent.
    pub fn new(times: Times, percent: f64) -> Self {
        let untimed = times.is_range() && is_timeless();
        Self { times: if untimed { UNTIMED } else { times }, percent }
    }

    /// Returns the largest number of runs of each guest, including the one that warms up.
    pub fn steps(&self) -> u64 {
        u64::from(self.times.most) + 1
    }

    /// Returns the parameter `runs` of results: the number that was asked for, not the number of
    /// runs made.
    pub fn param(&self) -> Value {
        let Times { least, most } = self.times;
        if least == most { least.into() } else { format!("{least}-{most}").into() }
    }

    /// Runs guests in turns: one turn to warm up, then the least number of turns, then more until
    /// the answer of each guest is narrow enough, until the largest number is reached, or until the
    /// time that is left is too short for another turn. Ctrl-C ends it at any time.
    ///
    /// # Errors
    /// Returns the error of a guest's run.
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
                session.repeat(Repetition::new(guest.name(), variant, answers, self.percent));
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

/// Returns whether the session was stopped, or its time limit would end a turn that takes a quarter
/// longer than the longest did.
fn no_time(session: &Session, longest: Duration) -> bool {
    session.interrupted() || session.left().is_some_and(|left| left < longest + longest / 4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kvm::populate::Populate;

    /// A guest whose answers are given.
    struct KnownGuest {
        answers: Vec<f64>,
        runs: usize,
    }

    impl Repeatable for KnownGuest {
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
            KnownGuest { answers, runs: 0 }
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
        struct Slow(KnownGuest);
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
        let mut slow = Slow(KnownGuest { answers, runs: 0 });
        let mut session = Session::quiet();
        session.limit(Duration::from_millis(600));
        repeat("--runs 6-60 --until 1").run(&mut [&mut slow], &mut session).unwrap();
        assert!(!session.interrupted() && slow.0.runs < 61, "{} runs", slow.0.runs);
        assert!(!session.repeated()[0].reached);
    }
}

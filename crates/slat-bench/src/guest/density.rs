//! Clears a sparse log: exactly the named pages, or the hull of each word of the bitmap.
//!
//! All pages are dirty and writable. Some pages of each word are cleared; then the guest writes all
//! pages, and faults where it may not. Linux protects the hull.

use crate::guest::fixture::{Fixture, SLOT};
use crate::guest::runner::{Locks, Runner};
use crate::guest::tables::Figures;
use crate::guest::turns::{Recorder, counts, ratios, take_turns};
use anyhow::ensure;
use slat::Format;
use slat_guest::FaultKind;
use slat_lab::record::Measurement;
use slat_lab::session::Session;
use slat_sim::arch::Arch;
use std::time::Instant;

/// Columns of the table.
pub const FIGURES: Figures = Figures {
    of: "guest-log-density",
    title: "Clearing sparse logs",
    counts: &[("clear", "protected", "pages protected"), ("clear", "faults", "write faults after")],
    note: "exact protects the pages that the bitmap names; hull all between the first and the \
           last of each word, Linux's way. Then the guest writes all pages.",
    ..Figures::NONE
};

/// Number of dirty bits in a word.
const DENSITIES: [u32; 7] = [1, 2, 4, 8, 16, 32, 64];

struct Sample {
    seconds: f64,
    protected: u64,
    faults: u64,
}

/// Measures each density, exactly and by hulls.
///
/// # Errors
/// A clear that did not protect the pages that it should have.
pub fn measure<F: Format, A: Arch>(
    fixture: &Fixture<F, A>,
    rounds: u32,
    session: &mut Session,
) -> anyhow::Result<Vec<Measurement>> {
    session.start("sparse clears", u64::from(rounds) + 1);
    let samples = take_turns(session, rounds, 2 * DENSITIES.len(), |place, _| {
        let (bits, hull) = (DENSITIES[place / 2], place % 2 == 1);
        session.say(&format!("{bits} of 64 pages"));
        sample(fixture, bits, hull)
    })?;
    session.finish();
    let mut results = Vec::new();
    for (place, samples) in samples.iter().enumerate().filter(|(_, samples)| !samples.is_empty()) {
        let mut params = fixture.params();
        params.insert("bits".to_owned(), DENSITIES[place / 2].into());
        let recorder = Recorder { scenario: "guest-log-density", params };
        let (variant, target) = [("exact", "engine"), ("hull", "baseline")][place % 2];
        let seconds = samples.iter().map(|sample| sample.seconds).collect();
        let counted = samples
            .iter()
            .map(|sample| counts([("protected", sample.protected), ("faults", sample.faults)]));
        results.push(recorder.figure(variant, target, "clear", "s", seconds, counted));
    }
    for (number, bits) in DENSITIES.iter().enumerate() {
        let of =
            |way: usize, figure: fn(&Sample) -> f64| samples[2 * number + way].iter().map(figure);
        if samples[2 * number].is_empty() {
            continue;
        }
        let recorder = Recorder { scenario: "guest-log-density", params: fixture.params() };
        let faults = |sample: &Sample| sample.faults as f64;
        results.push(recorder.ratio(
            format!("write faults after clearing {bits} of 64"),
            "exact",
            "hull",
            ratios(of(0, faults), of(1, faults)),
            None,
        ));
    }
    Ok(results)
}

/// Returns a number that has nothing in common with its neighbours'.
pub fn scatter(number: u64) -> u64 {
    fastrand::Rng::with_seed(number).u64(..)
}

/// Returns a word with `bits` bits, at places that depend on its number.
fn word(number: u64, bits: u32) -> u64 {
    let (mut word, mut rng) = (0u64, fastrand::Rng::with_seed(number));
    while word.count_ones() < bits {
        word |= 1 << rng.u32(..64);
    }
    word
}

/// Returns all bits from the first to the last one that is set.
const fn hull(word: u64) -> u64 {
    match word {
        0 => 0,
        word => (u64::MAX << word.trailing_zeros()) & (u64::MAX >> word.leading_zeros()),
    }
}

fn sample<F: Format, A: Arch>(
    fixture: &Fixture<F, A>,
    bits: u32,
    hulls: bool,
) -> anyhow::Result<Sample> {
    let words = fixture.pages() / 64;
    let bitmap: Vec<u64> = (0..words)
        .map(|number| word(number, bits))
        .map(|word| if hulls { hull(word) } else { word })
        .collect();
    let named = bitmap.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
    fixture.with_guest(fixture.config(), |guest| {
        let mut vcpu = Runner::new(guest, fixture.machine(), 0, Locks::Free)?;
        let write_all = |vcpu: &mut Runner<'_, '_, F, A>| -> anyhow::Result<u64> {
            let written = |guest: &crate::guest::fixture::TheGuest<'_, F, A>| {
                guest.stats().faults(FaultKind::MadeWritable).count
            };
            let before = written(guest);
            (0..fixture.pages()).try_for_each(|page| vcpu.write(fixture.gpa(page), page))?;
            Ok(written(guest) - before)
        };
        write_all(&mut vcpu)?;
        vcpu.worker().set_memslot(fixture.memslot(true))?;
        write_all(&mut vcpu)?;
        let begin = Instant::now();
        let cleared = vcpu.worker().clear_log(SLOT, 0, fixture.pages(), &bitmap)?;
        let seconds = begin.elapsed().as_secs_f64();
        let faults = write_all(&mut vcpu)?;
        ensure!(
            cleared.pages == named && faults == named,
            "{named} pages were to be cleared; {} were, and {faults} faulted",
            cleared.pages
        );
        Ok(Sample { seconds, protected: cleared.pages, faults })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_has_as_many_bits_as_asked_for_and_lies_in_its_hull() {
        for bits in DENSITIES {
            for number in 0..64 {
                let word = word(number, bits);
                assert_eq!(word.count_ones(), bits);
                assert_eq!(word & !hull(word), 0);
            }
        }
        assert_eq!([hull(0), hull(0b1001_0000), hull(1 << 63)], [0, 0b1111_0000, 1 << 63]);
    }
}

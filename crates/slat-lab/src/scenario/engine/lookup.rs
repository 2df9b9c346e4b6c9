//! Translating random addresses, beside another crate's tables of as many levels.

use super::bed::Bed;
use crate::arena::Arena;
use crate::cli::Part;
use crate::fill::Stores;
use crate::random::Numbers;
use crate::scenario::contest::{Contest, ENGINE, Sample, Watch};
#[cfg(feature = "peers")]
use crate::scenario::peers::crates as peers;
use crate::session::Session;
use anyhow::ensure;
use slat::format::ept::Ept1G;
use slat::{Attributes, Gpa, Guard, Member, PageSize};
use std::rc::Rc;

/// The quickest of the crates at it.
const PEER: &str = "page_table_multiarch";

/// Addresses looked up in one turn.
const LOOKUPS: usize = 1 << 20;

/// By one guard that is kept, by a guard for each address, and by the other crate.
pub fn contest<'a>(memory: u64, session: &mut Session) -> anyhow::Result<Contest<'a>> {
    let bed = Bed::new(Ept1G::default(), memory);
    let mut numbers = Numbers(3);
    let start = bed.range().start().0;
    let addresses: Rc<[u64]> = (0..LOOKUPS).map(|_| start + numbers.below(memory)).collect();
    let entrant = |kept| {
        let addresses = addresses.clone();
        move |arena: &mut Arena, _: bool| translate(&bed, &addresses, kept, arena)
    };
    let contest = super::pose(Part::Translate, memory, "random")
        .enter("translate", ENGINE, entrant(true))
        .enter("translate-entering", ENGINE, entrant(false));
    Ok(beside_a_peer(contest, bed, addresses, session))
}

#[cfg(feature = "peers")]
fn beside_a_peer<'a>(
    contest: Contest<'a>,
    bed: Bed<Ept1G>,
    addresses: Rc<[u64]>,
    session: &mut Session,
) -> Contest<'a> {
    let Some(peer) = slat_peers::PEERS.iter().find(|peer| peer.name == PEER) else {
        session.skip(format!("translate beside {PEER}"), "it is not for this kind of CPU");
        return contest;
    };
    let expected = sum(&bed, &addresses);
    contest
        .enter(PEER, PEER, move |arena, _| {
            let range = bed.range();
            let why = |error: String| anyhow::anyhow!("{PEER}: {error}");
            let mut tables = peers::tables(peer, arena)?;
            let mapped = tables.map_range(
                range.start().0,
                bed_host(&bed),
                range.size(),
                slat_peers::Leaf::Page4K,
            );
            mapped.map_err(why)?;
            let watch = Watch::start();
            let found = tables.lookup_all(&addresses).map_err(why)?;
            let seconds = watch.seconds();
            ensure!(found == expected, "the other crate found other addresses");
            Ok(Sample::time(seconds))
        })
        .ask("translate", &["translate"], &[PEER], 1.1)
        .ask("translate, a guard for each", &["translate-entering"], &[PEER], 1.1)
}

#[cfg(not(feature = "peers"))]
fn beside_a_peer<'a>(
    contest: Contest<'a>,
    _bed: Bed<Ept1G>,
    _addresses: Rc<[u64]>,
    session: &mut Session,
) -> Contest<'a> {
    session.skip(format!("translate beside {PEER}"), "built without the feature `peers`");
    contest
}

fn bed_host(bed: &Bed<Ept1G>) -> u64 {
    Bed::<Ept1G>::host(&bed.range()).0
}

/// What the addresses translate to, and one for each that may be written.
fn sum(bed: &Bed<Ept1G>, addresses: &[u64]) -> u64 {
    let delta = bed_host(bed) - bed.range().start().0;
    addresses.iter().fold(0, |sum, gpa| sum.wrapping_add(gpa + delta).wrapping_add(1))
}

fn translate(
    bed: &Bed<Ept1G>,
    addresses: &[u64],
    kept: bool,
    arena: &mut Arena,
) -> anyhow::Result<Sample> {
    arena.reset();
    arena.set_stores(Stores::Plain);
    let arena = &*arena;
    let tables = bed.live(arena, PageSize::SIZE_4K, Attributes::RAM)?;
    let mut member = Member::join(arena)?;
    let mut found = 0;
    let watch = Watch::start();
    if kept {
        let guard = tables.enter(&mut member)?;
        for &gpa in addresses {
            found = one(&guard, gpa, found)?;
        }
    } else {
        for &gpa in addresses {
            let guard = tables.enter(&mut member)?;
            found = one(&guard, gpa, found)?;
        }
    }
    let seconds = watch.seconds();
    ensure!(found == sum(bed, addresses), "addresses translate to others");
    Ok(Sample::time(seconds))
}

#[inline(always)]
fn one(guard: &Guard<'_, '_, Ept1G, Arena>, gpa: u64, sum: u64) -> anyhow::Result<u64> {
    Ok(match guard.translate(Gpa(gpa))? {
        Some(found) => sum.wrapping_add(found.hpa.0).wrapping_add(found.attributes.write.into()),
        None => sum,
    })
}

//! Translation of random addresses, compared with another crate's tables of as many levels.

use crate::contest::{Contest, ENGINE, Sample};
#[cfg(feature = "peers")]
use crate::peers::crates as peers;
use crate::settings::engine::Part;
use anyhow::ensure;
use slat::format::ept::Ept1G;
use slat::{Attributes, Gpa, Member, PageSize};
use slat_ideas::arena::Arena;
use slat_ideas::bed::{Bed, look_up, value};
use slat_ideas::fill::Stores;
use slat_ideas::format::TableFormat;
use slat_ideas::watch::Watch;
use slat_lab::session::Session;
use std::rc::Rc;

/// The crate that is fastest at this operation.
const PEER: &str = "page_table_multiarch";

/// Number of addresses that one turn looks up.
const LOOKUPS: usize = 1 << 20;

/// Returns the contest: with one guard for all addresses, with a guard for each, and with the
/// crate.
pub fn contest<'a>(memory: u64, session: &mut Session) -> anyhow::Result<Contest<'a>> {
    let bed = Bed::new(Ept1G::default(), memory);
    let addresses: Rc<[u64]> = bed.addresses(LOOKUPS).into();
    let entrant = |kept| {
        let addresses = addresses.clone();
        move |arena: &mut Arena, _: bool| translate(&bed, &addresses, kept, arena)
    };
    let contest = crate::contest::pose(Part::Translate, TableFormat::Ept, memory, "random")
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
    let expected = bed.sum(&addresses);
    contest
        .enter(PEER, PEER, move |arena, _| {
            let range = bed.range();
            let why = |error: String| anyhow::anyhow!("{PEER}: {error}");
            let mut tables = peers::tables(peer, arena)?;
            let mapped = tables.map_range(
                range.start().0,
                Bed::<Ept1G>::host(&range).0,
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
        .ratio("translate", &["translate"], &[PEER])
        .ratio("translate, a guard for each", &["translate-entering"], &[PEER])
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
    let watch = Watch::start();
    let found = if kept {
        look_up(&tables.enter(&mut member)?, addresses)?
    } else {
        let mut found = 0u64;
        for gpa in addresses {
            let guard = tables.enter(&mut member)?;
            let sum = guard.translate(Gpa(*gpa)).map(value);
            // The error is converted after the guard is dropped, so that the sum stays in
            // registers.
            drop(guard);
            found = found.wrapping_add(sum?);
        }
        found
    };
    let seconds = watch.seconds();
    ensure!(found == bed.sum(addresses), "addresses translate to others");
    Ok(Sample::time(seconds))
}

//! Translation of random addresses, compared with another crate's tables of as many levels.

use super::entering::Line;
use crate::arena::Arena;
use crate::contest::{Contest, ENGINE, MACHINE, Sample};
use crate::fill::Stores;
use crate::fixture::{Fixture, look_up, value};
use crate::format::TableFormat;
#[cfg(feature = "peers")]
use crate::peers::crates as peers;
use crate::settings::engine::Part;
use crate::stopwatch::Stopwatch;
use anyhow::ensure;
use slat::format::ept::Ept1G;
use slat::{Attributes, Gpa, PageSize, Reader};
use slat_lab::session::Session;
use std::rc::Rc;

/// The crate that is fastest at this operation.
const PEER: &str = "page_table_multiarch";

/// Number of addresses that one turn looks up.
const LOOKUPS: usize = 1 << 20;

/// How the addresses are looked up.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// By one guard.
    Kept,
    /// By one guard, which lets go of the tables that it has seen after each.
    Refreshed,
    /// By a guard for each.
    Entering,
    /// By one guard, with [`Line::around`] each.
    Exchanging,
}

/// Returns the contest of the ways, and of the crate.
pub fn contest<'a>(memory: u64, session: &mut Session) -> anyhow::Result<Contest<'a>> {
    let fixture = Fixture::new(Ept1G::default(), memory);
    let addresses: Rc<[u64]> = fixture.addresses(LOOKUPS).into();
    let entrant = |way| {
        let addresses = addresses.clone();
        move |arena: &mut Arena, _: bool| translate(&fixture, &addresses, way, arena)
    };
    let contest = crate::contest::pose(Part::Translate, TableFormat::Ept, memory, "random")
        .enter("translate", ENGINE, entrant(Way::Kept))
        .enter("translate-refreshed", ENGINE, entrant(Way::Refreshed))
        .enter("translate-entering", ENGINE, entrant(Way::Entering))
        .enter("translate-exchanging", MACHINE, entrant(Way::Exchanging))
        .ratio(
            "translate, a guard by an exchange for each",
            &["translate-entering"],
            &["translate-exchanging"],
        )
        .at_most(1.1);
    Ok(beside_a_peer(contest, fixture, addresses, session))
}

#[cfg(feature = "peers")]
fn beside_a_peer<'a>(
    contest: Contest<'a>,
    fixture: Fixture<Ept1G>,
    addresses: Rc<[u64]>,
    session: &mut Session,
) -> Contest<'a> {
    let Some(peer) = crate::crates::PEERS.iter().find(|peer| peer.name == PEER) else {
        session.skip(format!("translate beside {PEER}"), "it is not for this kind of CPU");
        return contest;
    };
    let expected = fixture.sum(&addresses);
    contest
        .enter(PEER, PEER, move |arena, _| {
            let range = fixture.range();
            let why = |error: String| anyhow::anyhow!("{PEER}: {error}");
            let mut tables = peers::tables(peer, arena)?;
            let mapped = tables.map_range(
                range.start().0,
                Fixture::<Ept1G>::host(&range).0,
                range.size(),
                crate::crates::Leaf::Page4K,
            );
            mapped.map_err(why)?;
            let watch = Stopwatch::start();
            let found = tables.lookup_all(&addresses).map_err(why)?;
            let seconds = watch.seconds();
            ensure!(found == expected, "the other crate found other addresses");
            Ok(Sample::time(seconds))
        })
        .ratio("translate", &["translate"], &[PEER])
        .at_most(1.1)
        .ratio("translate, refreshed after each", &["translate-refreshed"], &[PEER])
        .at_most(1.3)
        .ratio("translate, a guard for each", &["translate-entering"], &[PEER])
        .at_most(1.3)
        .ratio("  an exchange for each", &["translate-exchanging"], &[PEER])
}

#[cfg(not(feature = "peers"))]
fn beside_a_peer<'a>(
    contest: Contest<'a>,
    _bed: Fixture<Ept1G>,
    _addresses: Rc<[u64]>,
    session: &mut Session,
) -> Contest<'a> {
    session.skip(format!("translate beside {PEER}"), "built without the feature `peers`");
    contest
}

fn translate(
    fixture: &Fixture<Ept1G>,
    addresses: &[u64],
    way: Way,
    arena: &mut Arena,
) -> anyhow::Result<Sample> {
    arena.reset();
    arena.set_stores(Stores::Plain);
    let arena = &*arena;
    let tables = fixture.live(arena, PageSize::SIZE_4K, Attributes::RAM)?;
    let mut reader = Reader::register(arena)?;
    let line = Line::new();
    let mut found = 0u64;
    let watch = Stopwatch::start();
    match way {
        Way::Kept => found = look_up(&tables.enter(&mut reader)?, addresses)?,
        Way::Refreshed => {
            let mut guard = tables.enter(&mut reader)?;
            for gpa in addresses {
                found = found.wrapping_add(value(guard.translate(Gpa(*gpa))?));
                guard.refresh();
            }
        }
        Way::Entering => {
            for gpa in addresses {
                let guard = tables.enter(&mut reader)?;
                let sum = guard.translate(Gpa(*gpa)).map(value);
                // The error is converted after the guard is dropped, so that the sum stays in
                // registers.
                drop(guard);
                found = found.wrapping_add(sum?);
            }
        }
        Way::Exchanging => {
            let guard = tables.enter(&mut reader)?;
            for gpa in addresses {
                let sum = line.around(|| guard.translate(Gpa(*gpa)).map(value))?;
                found = found.wrapping_add(sum);
            }
        }
    }
    let seconds = watch.seconds();
    ensure!(found == fixture.sum(addresses), "addresses translate to others");
    Ok(Sample::time(seconds))
}

//! Faults that ask the host for their page between reservation and commit.

use super::super::Event;
use super::super::hardware::Hardware;
use super::links::retire_around;
use super::shape::{maintained, maintenance};
use super::{Mapping, World, cache, floor, size};
use slat::{
    Attributes, Gpa, GpaRange, Hpa, Interruption, LeafDelta, MapError, PageSize, UnmapEntry,
};
use std::cell::Cell;

/// The work of another thread while the fault waits for its page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Between {
    Nothing,
    Unmaps,
    Maps,
    Reserves,
}

/// The outcome of the fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Commit {
    To { far: u64, attributes: Attributes },
    GivenUp,
}

impl<H: Hardware> World<'_, H> {
    pub fn fault(
        &mut self,
        gpa: u64,
        largest: PageSize,
        frames: usize,
        (between, commit): (Between, Commit),
    ) {
        let before = self.begin();
        let mut storage = Vec::new();
        let mut own = cache::<H>(self.platform, &mut storage, frames);
        let mut more = Vec::new();
        let mut others = cache::<H>(self.platform, &mut more, 8);
        let page = floor(gpa, 1 << H::PAGE);
        let bits = self.hardware.address_bits();
        let platform = self.platform;
        // Another thread's page, at the lowest addresses of the reservation.
        let theirs = 1u64 << 40;
        let mut reader = self.other.take().unwrap();
        let theirs_came = Cell::new(LeafDelta::NONE);
        let out = self.run_removing(|tables, guard, _| {
            let reservation = guard.reserve(Gpa(gpa), largest, &mut own)?;
            let range = reservation.range();
            let mut their = tables.enter(&mut reader).unwrap();
            match between {
                Between::Nothing => {}
                Between::Unmaps => {
                    let mut none = [UnmapEntry::EMPTY; 1];
                    let mut batch = their.unmap_batch(&mut none);
                    assert_eq!(their.unmap(range, &mut batch), Ok(0));
                    assert_eq!(batch.complete().next(), None);
                }
                Between::Maps => {
                    let one = GpaRange::new(range.start(), 1 << H::PAGE).unwrap();
                    let smallest = size(1 << H::PAGE);
                    let ram = Attributes::RAM;
                    let done = their.map(one, Hpa(theirs), ram, smallest, &mut others);
                    assert_eq!(done, Ok(1 << H::PAGE));
                }
                Between::Reserves => {
                    let mut none = Vec::new();
                    let mut none = cache::<H>(platform, &mut none, 0);
                    let second = their.reserve(Gpa(gpa), largest, &mut none).unwrap();
                    assert_eq!(second.range(), range, "the same entry");
                }
            }
            theirs_came.set(*their.leaf_delta());
            drop(their);
            let since = platform.events.borrow().len();
            let result = match commit {
                Commit::GivenUp => Ok(None),
                Commit::To { far, attributes } => {
                    reservation.commit(Hpa(range.start().0.wrapping_add(far)), attributes)
                }
            };
            Ok((range, result, since))
        });
        self.other = Some(reader);
        self.sizes += theirs_came.get();
        let left = own.len();
        drop((own, others));

        let mut legal = self.page_errors(page, largest);
        if legal.is_empty()
            && let Some(run) = before.at(gpa)
        {
            let base = floor(gpa, run.size);
            let hpa = if base < run.start {
                Hpa(run.leaf.oa - (run.start - base))
            } else {
                Hpa(run.oa(base))
            };
            legal.push(MapError::Occupied { size: size(run.size), hpa });
        }
        if !legal.is_empty() {
            let Interruption { at, reason } = out.result.unwrap_err();
            assert!(at == Gpa(gpa) && legal.contains(&reason), "{reason} is not of {legal:?}");
            assert_eq!(left, frames);
            return self.settle(&out.tree);
        }
        // Down to the size wanted, and further where a table exists in its place.
        let root = self.hardware.root().height;
        let mut height = root;
        let mut built = 0;
        loop {
            let table = before.table(floor(gpa, H::size(height)), height).is_some();
            if !table && height <= H::height(largest.bytes()) && H::shift(height) <= bits {
                break;
            }
            built += usize::from(!table);
            height -= 1;
        }
        if built > frames {
            let stopped = Interruption { at: Gpa(gpa), reason: MapError::CacheEmpty };
            assert_eq!((out.result.unwrap_err(), left), (stopped, 0));
            return self.settle(&out.tree);
        }
        assert_eq!(left, frames - built, "tables above it");
        let bytes = H::size(height);
        let base = floor(gpa, bytes);
        let with_path = before.tables.len() + built;
        if between == Between::Unmaps {
            // The path that the fault built is empty, and so may be tables that it found.
            let mut emptied = Vec::new();
            retire_around(&before, (base, base + bytes), base, &mut emptied);
            self.retired += built + emptied.len();
            assert_eq!(out.tree.tables.len(), with_path - built - emptied.len());
        } else {
            assert!(out.tree.tables.len() >= with_path);
        }
        let range = GpaRange::new(Gpa(base), bytes).unwrap();
        let (found, result, since) = out.result.unwrap();
        assert_eq!(found, range);
        if between == Between::Maps {
            let what = Mapping { hpa: theirs, attributes: Attributes::RAM, largest };
            self.flat_map(base, 1 << H::PAGE, what);
        }
        let Commit::To { far, attributes } = commit else {
            return self.settle(&out.tree);
        };
        let hpa = base.wrapping_add(far);
        let mut legal: Vec<_> = self.host_error(hpa, bytes).into_iter().collect();
        if legal.is_empty() && !hpa.is_multiple_of(bytes) {
            let (page, bits) = (size(bytes), H::OUTPUT);
            legal.push(MapError::HostAddress { hpa: Hpa(hpa), page, bits });
        }
        legal.extend(self.hardware.refuses(attributes).into_iter().map(MapError::Attributes));
        if !legal.is_empty() {
            assert!(result.is_err_and(|reason| legal.contains(&reason)), "{result:?}");
            return self.settle(&out.tree);
        }
        // Two faults share a reservation: the first to commit has it.
        let valid = matches!(between, Between::Nothing | Between::Reserves);
        assert_eq!(result, Ok(valid.then_some(bytes)), "void once somebody was there");
        let wanted = maintenance(&attributes);
        let maintained = maintained(&out.events[since..], wanted.as_ref());
        let all = wanted.map_or(vec![], |_| vec![(hpa, hpa + bytes)]);
        assert_eq!(maintained, all, "memory made coherent");
        if valid {
            assert_eq!(out.events.last(), Some(&Event::Publish));
            self.flat_map(base, bytes, Mapping { hpa, attributes, largest });
        }
        self.settle(&out.tree);
    }
}

//! What is left of an operation that gave up, done after all other threads have ended.

use crate::guest::{Cache, On, Outcome, Rest};
use crate::hardware::WalkedFormat;
use crate::machine::PAGE;
use core::ops::Range;
use slat::*;
use std::vec::Vec;

impl<F: WalkedFormat> On<F> {
    pub fn map_rest(
        &self,
        rest: Outcome<MapError>,
        a: Attributes,
        size: u64,
        cache: &mut Cache<F>,
    ) {
        let rest = rest.and_then(|rest| self.map(rest.range, a, size, cache));
        assert!(rest.is_none(), "{rest:?}");
    }

    pub fn split_rest(&self, rest: Outcome<SplitError>, to: u64, cache: &mut Cache<F>) {
        let rest = rest.and_then(|rest| self.split(rest.range, to, cache).1);
        assert!(rest.is_none(), "{rest:?}");
    }

    pub fn protect_rest(&self, rest: Outcome<ChangeError>) {
        let rest = rest.and_then(|rest| self.protect(rest.range));
        assert!(rest.is_none(), "{rest:?}");
    }

    pub fn relax_rest(&self, rest: Outcome<ChangeError>, access: Access) {
        let rest = rest.and_then(|rest| self.relax(rest.range, access));
        assert!(rest.is_none(), "{rest:?}");
    }

    pub fn unmap_rest(
        &self,
        (mut removed, rest): (Vec<UnmappedRun>, Outcome<UnmapError>),
    ) -> Vec<UnmappedRun> {
        if let Some(rest) = rest {
            let (more, rest) = self.unmap(rest.range);
            assert!(rest.is_none(), "{rest:?}");
            removed.extend(more);
        }
        removed
    }

    /// As [`On::unmap_rest`], but leaves `beside`, which another thread may have mapped since.
    pub fn unmap_rest_unless(
        &self,
        (mut removed, rest): (Vec<UnmappedRun>, Outcome<UnmapError>),
        beside: Range<u64>,
    ) -> Vec<UnmappedRun> {
        let Some(rest) = rest else { return removed };
        for at in rest.range.step_by(PAGE as usize).filter(|at| !beside.contains(at)) {
            removed = self
                .unmap_rest((removed, Some(Rest { range: at..at + PAGE, reason: rest.reason })));
        }
        removed
    }
}

//! Tables that live for ever, so that a hook of the platform can be another thread in them.

use super::hardware::Hardware;
use super::world::{CacheOf, GuardOf, TablesOf, VMID, cache};
use super::{Moment, TestPlatform};
use slat::BreakBeforeMake;
use std::cell::Cell;
use std::rc::Rc;

/// Makes empty tables.
pub fn guest<H: Hardware>(
    bbm: BreakBeforeMake,
    format: H::Format,
) -> &'static TablesOf<'static, H> {
    let platform = Box::leak(Box::new(TestPlatform::new(bbm)));
    Box::leak(Box::new(TablesOf::<H>::new(format, VMID, 40, platform).unwrap()))
}

/// A thread in the tables, with a cache of eight frames.
pub fn inside<H: Hardware, R>(
    tables: &'static TablesOf<'static, H>,
    run: impl FnOnce(&mut GuardOf<'_, 'static, H>, &mut CacheOf<'_, H>) -> R,
) -> R {
    let mut reader = tables.platform().register();
    let mut storage = Vec::new();
    let mut cache = cache::<H>(tables.platform(), &mut storage, 8);
    run(&mut tables.enter(&mut reader).unwrap(), &mut cache)
}

/// Has another thread do `act` during the first invalidation that `run` executes.
pub fn meanwhile<R>(
    platform: &TestPlatform,
    act: impl FnOnce() + 'static,
    run: impl FnOnce() -> R,
) -> R {
    let did = Rc::new(Cell::new(false));
    let (done, mut act) = (did.clone(), Some(act));
    platform.meanwhile(Some(Box::new(move |_, moment| {
        if let Some(act) = act.take_if(|_| moment == Moment::Invalidating) {
            act();
            done.set(true);
        }
    })));
    let result = run();
    platform.meanwhile(None);
    assert!(did.get(), "nothing was invalidated");
    result
}

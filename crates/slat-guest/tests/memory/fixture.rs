//! A machine, a host's memory, and a guest on both.

#[macro_use]
#[path = "cases.rs"]
mod cases;

pub use self::cases::*;
use slat::{Format, Gpa, GpaRange, Hpa, Invalidation, Memory, PageSize, Platform, Vmid};
use slat_guest::*;
use slat_sim::{Arch, Machine, Moment};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

pub const VMID: Vmid = Vmid(7);
pub const BITS: u32 = 39;
pub const K4: u64 = 4 << 10;
pub const M2: u64 = 2 << 20;
pub const G1: u64 = 1 << 30;
/// The address of the guests' memory, and of its host memory: both have the same alignment up to 1
/// GiB.
pub const BASE: u64 = 4 * G1;
pub const HOST: u64 = 0x7000_0000_0000;
/// The address, in private memory, of the guest's page at [`BASE`].
pub const HIDDEN: u64 = 2 * G1;

/// A page of the host.
#[derive(Clone, Copy, Debug)]
pub struct HostPage {
    pub hpa: u64,
    pub block: PageSize,
    pub write: bool,
    pub execute: bool,
    pub ready: bool,
    /// The page is the guest's own, even if it may not be written at the moment.
    pub own: bool,
}

#[derive(Debug)]
pub struct HostState {
    pages: HashMap<u64, HostPage>,
    private: HashMap<u64, PrivatePage>,
    next: u64,
    /// The number of faults that asked.
    pub asked: u64,
    /// The number of calls of `Backing::wait`.
    pub waits: u64,
}

/// The host's memory, by its addresses.
#[derive(Clone, Debug)]
pub struct Ram(Arc<Mutex<HostState>>);

impl Ram {
    pub fn new() -> Self {
        Self::from(64 * G1)
    }

    /// Host physical memory from `next` on is free.
    pub fn from(next: u64) -> Self {
        let (pages, private, asked, waits) = Default::default();
        let state = HostState { pages, private, next, asked, waits };
        Self(Arc::new(Mutex::new(state)))
    }

    pub fn state(&self) -> MutexGuard<'_, HostState> {
        self.0.lock().unwrap()
    }

    /// Adds memory at `hva`, in blocks of `block`.
    pub fn populate(&self, hva: u64, bytes: u64, block: PageSize) {
        let mut state = self.state();
        let mut at = hva;
        while at < hva + bytes {
            let hpa = state.take(block.bytes());
            let end = (at & !(block.bytes() - 1)) + block.bytes();
            while at < end.min(hva + bytes) {
                let hpa = hpa + (at & (block.bytes() - 1));
                let page =
                    HostPage { hpa, block, write: true, execute: true, ready: true, own: false };
                state.pages.insert(at / K4, page);
                at += K4;
            }
        }
    }

    /// Adds private memory at `at`, in blocks of `block`.
    pub fn populate_private(&self, at: u64, bytes: u64, block: PageSize) {
        let mut state = self.state();
        for first in (at..at + bytes).step_by(block.bytes() as usize) {
            let hpa = state.take(block.bytes());
            for offset in (0..block.bytes()).step_by(K4 as usize) {
                let page = PrivatePage { hpa: Hpa(hpa + offset), block };
                state.private.insert((first + offset) / K4, page);
            }
        }
    }

    pub fn private(&self, at: u64) -> Option<PrivatePage> {
        self.state().private.get(&(at / K4)).copied()
    }

    pub fn remove_private(&self, at: u64) {
        self.state().private.remove(&(at / K4));
    }

    pub fn change(&self, hva: u64, change: impl FnOnce(&mut HostPage)) {
        change(self.state().pages.get_mut(&(hva / K4)).unwrap());
    }

    pub fn remove(&self, hva: u64) {
        self.state().pages.remove(&(hva / K4));
    }

    pub fn get(&self, hva: u64) -> Option<HostPage> {
        self.state().pages.get(&(hva / K4)).copied()
    }

    /// Moves `hva` to another page; returns the old and the new address.
    pub fn migrate(&self, hva: u64) -> (u64, u64) {
        let mut state = self.state();
        let new = state.take(K4);
        let block = hva / M2 * 512;
        // The pages around it are no longer a block.
        for page in block..block + 512 {
            if let Some(page) = state.pages.get_mut(&page) {
                page.block = PageSize::SIZE_4K;
            }
        }
        let page = state.pages.get_mut(&(hva / K4)).unwrap();
        (core::mem::replace(&mut page.hpa, new), new)
    }
}

impl HostState {
    fn take(&mut self, bytes: u64) -> u64 {
        let hpa = self.next.next_multiple_of(bytes);
        self.next = hpa + bytes;
        hpa
    }
}

impl Backing for Ram {
    fn page(&self, host: Hva, access: slat::Access) -> Result<Page, NoPage> {
        let mut state = self.state();
        state.asked += 1;
        let Some(page) = state.pages.get(&(host.0 / K4)).copied() else {
            return Err(NoPage::Never);
        };
        if !page.ready {
            return Err(NoPage::Absent);
        }
        if !page.write && access == slat::Access::Write {
            // A copy for the guest alone.
            let hpa = state.take(K4);
            let page = HostPage { hpa, block: PageSize::SIZE_4K, write: true, ..page };
            state.pages.insert(host.0 / K4, page);
            return Ok(answer(page));
        }
        Ok(answer(page))
    }

    fn private_page(&self, at: PrivateAt) -> Result<PrivatePage, NoPage> {
        self.private(at.0).ok_or(NoPage::Never)
    }

    fn wait(&self) {
        self.state().waits += 1;
        std::thread::yield_now();
    }

    fn make_writable<R>(&self, host: Hva, grant: impl FnOnce(Page) -> R) -> Option<R> {
        let mut state = self.state();
        let page = state.pages.get_mut(&(host.0 / K4)).filter(|page| page.ready && page.own)?;
        page.write = true;
        let page = *page;
        Some(grant(answer(page)))
    }
}

type Callback<'b> = Box<dyn FnOnce() + Send + 'b>;

/// Memory of the host that changes while a fault asks for it.
pub struct Asked<'b> {
    pub ram: &'b Ram,
    then: Mutex<Option<(u32, Callback<'static>)>>,
}

impl<'b> Asked<'b> {
    pub fn new(ram: &'b Ram) -> Self {
        Self { ram, then: Mutex::default() }
    }

    /// Does `work`, a fault, and `then` once it has so many more answers than one, or before it has
    /// one of private memory.
    pub fn then<R>(&self, more: u32, then: impl FnOnce() + Send, work: impl FnOnce() -> R) -> R {
        struct Off<'a, 'b>(&'a Asked<'b>);
        impl Drop for Off<'_, '_> {
            fn drop(&mut self) {
                self.0.then.lock().unwrap().take();
            }
        }
        let then: Callback<'_> = Box::new(then);
        // SAFETY: `Off` takes the closure out, if no fault has, before what it borrows ends.
        let then = unsafe { core::mem::transmute::<Callback<'_>, Callback<'static>>(then) };
        *self.then.lock().unwrap() = Some((more, then));
        let _off = Off(self);
        work()
    }

    fn asks(&self) {
        let mut then = self.then.lock().unwrap();
        if let Some((more, _)) = &mut *then
            && *more > 0
        {
            *more -= 1;
            return;
        }
        let now = then.take();
        // Outside the lock, because the closure may ask as well.
        drop(then);
        now.into_iter().for_each(|(_, then)| then());
    }
}

impl Backing for &Asked<'_> {
    fn page(&self, host: Hva, access: slat::Access) -> Result<Page, NoPage> {
        let page = self.ram.page(host, access);
        self.asks();
        page
    }

    fn private_page(&self, at: PrivateAt) -> Result<PrivatePage, NoPage> {
        self.asks();
        self.ram.private_page(at)
    }
}

fn answer(page: HostPage) -> Page {
    Page {
        hpa: Hpa(page.hpa),
        block: page.block,
        write: page.write,
        execute: page.execute,
        memory: Memory::Normal,
    }
}

/// Tells the machine that the guest owns all memory that it may ever have.
pub fn give_all<C: Case>(machine: &Machine<C::A>) {
    machine.give(Hpa(C::FIRST_HPA), 1 << 38);
}

/// Asserts that the counters agree with a walk for each size.
pub fn check_mapped<F: Format, H: Host, B: Backing>(worker: &mut Worker<'_, F, H, B>) {
    let walked = worker.leaves_by_size().into_iter();
    let walked: Vec<_> = walked.map(|(size, count)| (size, count * size.bytes())).collect();
    assert_eq!(worker.guest().stats().mapped.by_size(), walked);
}

pub type TheGuest<'p, C> = Guest<'p, <C as Case>::F, Machine<<C as Case>::A>, Ram>;
pub type TheVcpu<'w, C> = Vcpu<'w, <C as Case>::F, Machine<<C as Case>::A>, Ram>;
pub type TheWorker<'w, C> = Worker<'w, <C as Case>::F, Machine<<C as Case>::A>, Ram>;

/// An exit of the CPU: adds its buffer to the log.
pub fn take_buffer<C: Case>(machine: &Machine<C::A>, worker: &mut TheWorker<'_, C>, cpu: usize) {
    match C::BUFFER {
        Some(Buffer::Pml) => {
            let (log, index) = machine.cpu(cpu).take_pml();
            worker.log_addresses(pml_addresses(&log, index));
        }
        Some(Buffer::Hdbss) => {
            let (buffer, index) = machine.cpu(cpu).take_hdbss();
            worker.log_addresses(hdbss_addresses::<C::F>(&buffer, index));
        }
        None => {}
    }
}

pub fn guest<'p, C: Case>(
    machine: &'p Machine<C::A>,
    ram: &Ram,
    config: Config,
) -> TheGuest<'p, C> {
    Guest::new(C::format(), VMID, BITS, machine, ram.clone(), config).unwrap()
}

pub fn memslot(bytes: u64) -> MemslotSpec {
    MemslotSpec::new(MemslotId(0), Gpa(BASE), bytes, Hva(HOST))
}

pub fn logged(bytes: u64) -> MemslotSpec {
    MemslotSpec { log_dirty: true, ..memslot(bytes) }
}

/// A memslot whose pages may be private.
pub fn hidden(bytes: u64) -> MemslotSpec {
    MemslotSpec { private: Some(PrivateAt(HIDDEN)), ..memslot(bytes) }
}

pub fn private_range(at: u64, bytes: u64) -> PrivateRange {
    PrivateRange { start: PrivateAt(at), bytes }
}

pub fn config() -> Config {
    Config::new(2, PageSize::SIZE_1G)
}

pub fn range(start: u64, bytes: u64) -> GpaRange {
    GpaRange::new(Gpa(start), bytes).unwrap()
}

pub fn host_range(start: u64, bytes: u64) -> HvaRange {
    HvaRange { start: Hva(start), bytes }
}

/// The vCPU uses `gpa`, and its faults are handled, until the access succeeds or the VMM has to do
/// something.
pub fn attempt<C: Case>(
    machine: &Machine<C::A>,
    vcpu: &mut TheVcpu<'_, C>,
    gpa: u64,
    access: slat::Access,
) -> Result<(Hpa, Vec<Outcome>), Outcome> {
    let cpu = machine.cpu(vcpu.id() as usize);
    machine.here(vcpu.id() as usize);
    let used = match access {
        slat::Access::Read => slat_sim::Access::Read,
        slat::Access::Write => slat_sim::Access::Write,
        _ => slat_sim::Access::Execute,
    };
    let mut outcomes = Vec::new();
    for _ in 0..32 {
        if let Ok(hpa) = cpu.access(gpa, used) {
            return Ok((hpa, outcomes));
        }
        match vcpu.fault(Gpa(gpa & !(K4 - 1)), access) {
            outcome @ (Outcome::Mmio | Outcome::RingFull | Outcome::Refused(_)) => {
                return Err(outcome);
            }
            outcome @ Outcome::Retry(
                Retry::Absent(_) | Retry::Invalidated | Retry::Converting | Retry::MemslotDeleting,
            ) => {
                return Err(outcome);
            }
            outcome => outcomes.push(outcome),
        }
    }
    panic!("no progress at {gpa:#x}: {outcomes:?}")
}

/// Gives the guest a VMID that no guest has had. The CPUs load it, and invalidate their entries of
/// the old one, which is returned.
pub fn set_vmid<'w, 'v, C: Case>(
    machine: &Machine<C::A>,
    guest: &TheGuest<'_, C>,
    vcpus: impl Iterator<Item = &'v TheVcpu<'w, C>> + Clone,
    to: Vmid,
) -> Vmid
where
    'w: 'v,
{
    let cpu = |vcpu: &TheVcpu<'w, C>| machine.cpu(usize::from(vcpu.id()));
    vcpus.clone().for_each(|vcpu| cpu(vcpu).unload());
    // SAFETY:
    // 1. No CPU has a root of the guest loaded, or entries under `to`.
    // 2. No other guest gets the old VMID before all entries under it are invalidated.
    let old = unsafe { guest.set_vmid(to) };
    machine.invalidate(&Invalidation { vmid: old, range: None, leaf: None, tables: true });
    vcpus.for_each(|vcpu| cpu(vcpu).load(to, vcpu.root()));
    old
}

/// Runs a test's body on two formats; with the feature `every-format` also on the others, in a
/// module of its own.
#[macro_export]
macro_rules! on_all {
    ($($(#[$meta:meta])* fn $name:ident<$C:ident: Case>() $body:block)*) => {$(
        mod $name {
            #[allow(unused_imports, reason = "bodies differ")]
            use super::*;

            fn run<$C: Case>() $body

            mod usual {
                use super::*;

                $crate::on_cases!(run: on_arm ArmPlain, on_intel Intel);
            }

            #[cfg(feature = "every-format")]
            mod every {
                use super::*;

                $crate::on_cases!(run: on_arm_with_hardware_dirty_state ArmDirty);
                $crate::on_others!(run);
            }
        }
    )*};
}

/// Does `work`; what another thread does at each moment of the machine meanwhile is `then`.
pub fn beside<A: Arch + 'static, R>(
    machine: &Machine<A>,
    then: impl FnMut(&Machine<A>, Moment) + Send,
    work: impl FnOnce() -> R,
) -> R {
    struct Hooked<'m, A: Arch>(&'m Machine<A>);
    impl<A: Arch> Drop for Hooked<'_, A> {
        fn drop(&mut self) {
            self.0.undisturbed();
        }
    }
    type Hook<'h, A> = Box<dyn FnMut(&Machine<A>, Moment) + Send + 'h>;
    let then: Hook<'_, A> = Box::new(then);
    // SAFETY: `Hooked` takes the hook off before what it borrows ends; no other thread is in it.
    machine.meanwhile(unsafe { core::mem::transmute::<Hook<'_, A>, Hook<'static, A>>(then) });
    let _hooked = Hooked(machine);
    work()
}

/// Records that a thread has ended, even if it panics, because others wait for it.
pub struct EndFlag<'d>(pub &'d std::sync::atomic::AtomicBool);

impl Drop for EndFlag<'_> {
    fn drop(&mut self) {
        self.0.store(true, std::sync::atomic::Ordering::Relaxed);
    }
}

/// Makes a machine, a guest with memslot 0 of `$bytes`, in blocks of `$block`, and its first vCPU.
#[macro_export]
macro_rules! with_guest {
    ($C:ident, $config:expr, $spec:expr, $block:expr
        => $machine:ident, $ram:ident, $guest:ident, $vcpu:ident) => {
        let $machine = $C::machine(2);
        give_all::<$C>(&$machine);
        let $ram = Ram::from($C::FIRST_HPA);
        let $guest = guest::<$C>(&$machine, &$ram, $config);
        #[allow(unused_mut, reason = "tests differ")]
        let mut $vcpu = Vcpu::new(&$guest, 0).unwrap();
        $machine.cpu(0).load(VMID, $vcpu.root());
        let spec: MemslotSpec = $spec;
        $ram.populate(spec.host.0, spec.bytes, $block);
        assert_eq!($vcpu.worker().set_memslot(spec), Ok(MemslotChange::Inserted));
    };
}

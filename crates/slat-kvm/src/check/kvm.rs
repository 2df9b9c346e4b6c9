//! The host's KVM as the system on which histories run.

use super::counters::Counters;
use super::generate::Means;
use super::history::{Act, History, Kind, Place, Span, Way};
use super::host::{Hands, able};
use super::model::HOLE;
use super::pager::{Pager, features};
use super::patience::outlast;
use super::{HistoryEnd, Stamp, System, Task, TaskResult, Trouble};
use crate::arch::{self, MEMORY_GPA};
use crate::guest::{Guest, Part, Shape, Vcpu};
use crate::ioctl::{DirtyPage, VmDirtyLog};
use crate::work::Work;
use crate::{Backing, Error, HostKvm, meminfo, private, probe};
use kvm_bindings::{KVM_CAP_READONLY_MEM, KVM_MEM_LOG_DIRTY_PAGES, KVM_MEM_READONLY};
use kvm_ioctls::VcpuExit;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

/// What this host's KVM, and the host itself, can do.
#[derive(Debug, Clone)]
pub struct Host {
    /// KVM.
    pub kvm: HostKvm,
    /// What histories may use.
    pub means: Means,
    /// What cannot be tried, and why.
    pub lacks: BTreeMap<Act, String>,
}

impl Host {
    /// Examines the host, for histories with `bytes` bytes of memory.
    ///
    /// # Errors
    /// The errors of [`probe()`]; [`Error::Invalid`] if the memory is no whole number of huge
    /// pages, at least two, or more than 1 GiB; [`Error::NotEnoughMemory`].
    pub fn here(bytes: u64) -> Result<Self, Error> {
        let opened = probe::open()?;
        let kvm = probe::describe(&opened);
        let page = rustix::param::page_size() as u64;
        let block = Backing::Thp.page_size();
        if bytes == 0 || !bytes.is_multiple_of(block) || bytes < 2 * block || bytes > 1 << 30 {
            let rule = format!("must be a multiple of {block}, at least two of it, at most 1 GiB");
            return Err(Error::invalid("memory", bytes, rule));
        }
        arch::check(&opened, bytes * 2)?;
        // A forked process, and what is moved or paged out, have a copy each.
        meminfo::check(bytes.saturating_mul(3))?;
        let modes = [Way::Legacy, Way::Manual, Way::InitiallySet, Way::Ring];
        let ways = modes.into_iter().filter(|way| way.mode().check(&kvm).is_ok()).collect();
        let kinds = [Kind::Small, Kind::Huge, Kind::Shared];
        let kinds = kinds.into_iter().filter(|kind| kind.backing().check(bytes).is_ok()).collect();
        let mut lacks = BTreeMap::new();
        let mut acts = Vec::new();
        let pager = match features() {
            Ok(had) => {
                let has = |has: bool| has.then_some(()).ok_or("this kernel's userfaultfd lacks it");
                vec![
                    (Act::Late, Ok(())),
                    (Act::Guard, has(had.protects).map_err(str::to_owned)),
                    (Act::Minor, has(had.minor).map_err(str::to_owned)),
                ]
            }
            Err(error) => {
                [Act::Late, Act::Guard, Act::Minor].map(|act| (act, Err(error.to_string()))).into()
            }
        };
        let own = [(Act::Punch, private::check(&opened)), (Act::Recover, recovers(&kvm).map(drop))];
        for (act, able) in able(bytes).into_iter().chain(pager).chain(own) {
            match able {
                Ok(()) => acts.push(act),
                Err(why) => _ = lacks.insert(act, why),
            }
        }
        let readonly = opened.check_extension_raw(KVM_CAP_READONLY_MEM.into()) > 0;
        let means =
            Means { memory: bytes / page, block: block / page, ways, kinds, acts, readonly };
        Ok(Self { kvm, means, lacks })
    }
}

/// Longest period of recovery for which a history waits.
const PERIOD: Duration = Duration::from_millis(500);

/// Returns how often KVM recovers huge pages that it split to execute from them.
fn recovers(kvm: &HostKvm) -> Result<Duration, String> {
    let parameter = |name| kvm.parameters.get(name).map(String::as_str);
    if parameter("nx_huge_pages") != Some("Y") {
        return Err("kvm.nx_huge_pages is off".to_owned());
    }
    let number = |name| parameter(name).and_then(|it| it.parse().ok()).unwrap_or(0);
    let period = Duration::from_millis(number("nx_huge_pages_recovery_period_ms"));
    match period.is_zero() || period > PERIOD || number("nx_huge_pages_recovery_ratio") == 0 {
        true => Err(format!(
            "huge pages are recovered too seldom: it needs \
             kvm.nx_huge_pages_recovery_period_ms of at most {}, and recovery_ratio=1",
            PERIOD.as_millis()
        )),
        false => Ok(period),
    }
}

/// Runs a history on a new guest of this host's KVM. `at` is as in [`check()`](super::check()), and
/// the others as in [`KvmSystem::new`].
pub fn run(
    history: &History,
    host: &Host,
    patience: Duration,
    stop: &Arc<AtomicBool>,
    at: &mut dyn FnMut(usize, &str) -> bool,
) -> HistoryEnd {
    match KvmSystem::new(history, host, patience, stop) {
        Ok(mut system) => super::check(history, gpa, &mut system, at),
        Err(error) => HistoryEnd::Stopped(error),
    }
}

/// Returns the guest address of a page of the window.
fn gpa(page: u64) -> u64 {
    MEMORY_GPA + page * rustix::param::page_size() as u64
}

enum Order {
    Load(Part, Work),
    Leave,
}

enum Answer {
    Loaded(Result<(), Error>),
    Done(Result<TaskResult, Error>),
}

struct Thread {
    orders: Sender<Order>,
    answers: Receiver<Answer>,
    handle: Option<JoinHandle<()>>,
    /// The number of the vCPU's next step when it started.
    from: u64,
    /// Whether it has been started, and not been waited for.
    runs: bool,
}

/// A guest of this host's KVM.
pub struct KvmSystem {
    threads: Vec<Thread>,
    guest: Guest,
    hands: Hands,
    pager: Option<Pager>,
    slots: BTreeMap<u32, Place>,
    counters: Option<Counters>,
    /// How long to wait for the recovery of huge pages.
    recovery: Duration,
    patience: Duration,
    stop: Arc<AtomicBool>,
}

extern "C" fn ignore(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

impl KvmSystem {
    /// Makes the guest of a history. `stop` ends waits; a vCPU that makes no progress for
    /// `patience` hangs.
    ///
    /// # Errors
    /// As [`Guest::new`].
    pub fn new(
        history: &History,
        host: &Host,
        patience: Duration,
        stop: &Arc<AtomicBool>,
    ) -> Result<Self, Error> {
        let page = rustix::param::page_size() as u64;
        let bytes = |pages: u64| {
            let limit = pages > 0 && pages <= (4 << 30) / page;
            limit.then_some(pages * page).ok_or_else(|| {
                Error::invalid("pages of the history", pages, "must be at most 4 GiB")
            })
        };
        if history.vcpus == 0 || history.vcpus > 8 {
            return Err(Error::invalid("vCPUs of the history", history.vcpus, "must be 1 to 8"));
        }
        let memory = bytes(history.memory)?;
        let shape = Shape {
            memory,
            backing: history.backing.backing(),
            vcpus: history.vcpus,
            overlap: true,
            mode: history.way.mode(),
            ..Shape::default()
        };
        shape.check(&host.kvm)?;
        register_signal_handler(SIGRTMIN(), ignore)
            .map_err(|error| Error::os("sigaction")(std::io::Error::from(error)))?;
        let (guest, vcpus) = Guest::with_window(&shape, bytes(history.window)?, history.private)?;
        let hands = Hands::new(memory, page, history.backing == Kind::Shared)?;
        let counters = Counters::of(&guest, &host.kvm);
        let recovery = 2 * recovers(&host.kvm).unwrap_or_default();
        let mut threads = Vec::new();
        for vcpu in vcpus {
            let (orders, theirs) = channel();
            let (answer, answers) = channel();
            let handle = std::thread::Builder::new()
                .name(format!("vcpu{}", vcpu.index()))
                .spawn(move || serve(vcpu, &theirs, &answer))
                .map_err(Error::os("start of a vCPU's thread"))?;
            threads.push(Thread { orders, answers, handle: Some(handle), from: 0, runs: false });
        }
        let (pager, slots) = (None, BTreeMap::new());
        let stop = Arc::clone(stop);
        Ok(Self { threads, guest, hands, pager, slots, counters, recovery, patience, stop })
    }

    fn lost<T>(&self) -> Result<T, Trouble> {
        Err(Trouble::Refused(Error::ThreadPanicked))
    }

    fn pager(&mut self) -> Result<&mut Pager, Error> {
        if self.pager.is_none() {
            self.pager = Some(Pager::new(self.guest.page_size())?);
        }
        Ok(self.pager.as_mut().expect("it was made above"))
    }

    fn settle(&mut self) -> Result<(), Error> {
        match &mut self.pager {
            Some(pager) => pager.settle(self.guest.memory()),
            None => Ok(()),
        }
    }
}

/// A vCPU's thread.
fn serve(mut vcpu: Vcpu, orders: &Receiver<Order>, answers: &Sender<Answer>) {
    while let Ok(Order::Load(part, work)) = orders.recv() {
        vcpu.set_part(part);
        vcpu.take_sum();
        let loaded = vcpu.load(&work);
        let is_loaded = loaded.is_ok();
        if answers.send(Answer::Loaded(loaded)).is_err() {
            return;
        }
        if !is_loaded {
            continue;
        }
        let page_size = rustix::param::page_size() as u64;
        let mut exits = BTreeSet::new();
        let ran = vcpu.run_beside(&mut |exit| {
            let at = match exit {
                VcpuExit::MmioWrite(at, _) => *at,
                VcpuExit::MmioRead(at, data) => {
                    data.fill(HOLE as u8);
                    *at
                }
                _ => return false,
            };
            // Only addresses of the window: others are a fault of the guest's.
            at.checked_sub(MEMORY_GPA).map(|at| exits.insert(at / page_size)).is_some()
        });
        let done = ran.map(|steps| TaskResult { steps, exits, sum: vcpu.take_sum() });
        if answers.send(Answer::Done(done)).is_err() {
            return;
        }
    }
}

impl System for KvmSystem {
    fn set_slot(&mut self, id: u32, slot: Option<(Place, bool)>) -> Result<(), Trouble> {
        let page = self.guest.page_size();
        let Some((place, log)) = slot else {
            let old = self.slots.remove(&id);
            self.guest.set_slot(id, 0, 0..0, 0)?;
            return match old.filter(|_| self.guest.is_private()) {
                Some(old) => Ok(self.guest.convert(old.at, old.pages, false)?),
                None => Ok(()),
            };
        };
        let flags = if log { KVM_MEM_LOG_DIRTY_PAGES } else { 0 }
            | if place.readonly { KVM_MEM_READONLY } else { 0 };
        let range = place.host * page..place.host().end() * page;
        self.guest.set_slot(id, place.at, range, flags)?;
        self.slots.insert(id, place);
        Ok(())
    }

    fn start(&mut self, vcpu: usize, task: &Task) -> Result<(), Trouble> {
        let from = self.guest.position(vcpu);
        let Some(thread) = self.threads.get_mut(vcpu) else { return self.lost() };
        thread.from = from;
        let part = Part { first: task.guest.at, pages: task.guest.pages };
        if thread.orders.send(Order::Load(part, task.work)).is_err() {
            return self.lost();
        }
        match thread.answers.recv() {
            Ok(Answer::Loaded(loaded)) => loaded?,
            _ => return self.lost(),
        }
        thread.runs = true;
        Ok(())
    }

    fn wait(&mut self, vcpu: usize, stop: bool) -> Result<Option<TaskResult>, Trouble> {
        if stop {
            self.guest.ask_to_stop(vcpu);
        }
        let (mut position, mut since) = (self.guest.position(vcpu), Instant::now());
        let mut outlasted = false;
        loop {
            let Some(thread) = self.threads.get_mut(vcpu) else { return self.lost() };
            match thread.answers.recv_timeout(Duration::from_millis(2)) {
                Ok(Answer::Done(done)) => {
                    thread.runs = false;
                    return Ok(Some(done?));
                }
                Ok(Answer::Loaded(_)) | Err(RecvTimeoutError::Disconnected) => return self.lost(),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if self.stop.load(Ordering::Relaxed) {
                return Err(Trouble::Refused(Error::Stopped));
            }
            if self.guest.has_full_ring() {
                return Ok(None);
            }
            let now = self.guest.position(vcpu);
            if now != position {
                (position, since, outlasted) = (now, Instant::now(), false);
            } else if since.elapsed() > self.patience && !outlasted {
                // It may have ended meanwhile without a further step.
                outlasted = !outlast(self.patience, || self.guest.position(vcpu) != position);
            } else if outlasted {
                return Err(Trouble::Hang(format!(
                    "vCPU {vcpu} makes no progress for {} s",
                    self.patience.as_secs()
                )));
            }
        }
    }

    fn progress(&self, vcpu: usize) -> u64 {
        self.threads.get(vcpu).map_or(0, |it| self.guest.position(vcpu).saturating_sub(it.from))
    }

    fn kick(&mut self, vcpu: usize, times: u32) {
        let handle = self.threads.get(vcpu).and_then(|thread| thread.handle.as_ref());
        for _ in 0..times {
            let _ = handle.map(|handle| handle.kill(SIGRTMIN()));
            std::thread::yield_now();
        }
    }

    fn fetch(&mut self, id: u32, pages: u64, chunk: u32) -> Result<BTreeSet<u64>, Trouble> {
        let mut words = vec![0; pages.div_ceil(64) as usize];
        let vm = self.guest.vm();
        // SAFETY: the memslot has `pages` pages, as the caller placed it, and there is a bit for
        // each.
        unsafe { vm.get_dirty_log_into(id, &mut words) }.map_err(Error::os("KVM_GET_DIRTY_LOG"))?;
        if self.guest.mode().is_manual() {
            let chunk = if chunk == 0 { pages } else { u64::from(chunk) };
            for first in (0..pages).step_by(chunk as usize) {
                let count = chunk.min(pages - first) as u32;
                vm.clear_dirty_log(id, first, count, &words[(first / 64) as usize..])
                    .map_err(Error::os("KVM_CLEAR_DIRTY_LOG"))?;
            }
        }
        Ok((0..pages).filter(|page| words[(page / 64) as usize] >> (page % 64) & 1 == 1).collect())
    }

    fn harvest(&mut self, threads: u32) -> Result<BTreeSet<(u32, u64)>, Trouble> {
        let mut told = BTreeSet::new();
        self.guest
            .harvest_with(threads, |DirtyPage { slot, page }| _ = told.insert((slot, page)))?;
        Ok(told)
    }

    fn act(&mut self, act: Act, host: Span) -> Result<(), Trouble> {
        match act {
            Act::Recover => std::thread::sleep(self.recovery),
            Act::Punch => {
                let page = self.guest.page_size();
                self.guest.punch(host.at * page..host.end() * page)?;
            }
            Act::Late | Act::Minor | Act::Guard => {
                self.pager()?;
                let Some(pager) = &mut self.pager else { return self.lost() };
                let memory = self.guest.memory();
                match act {
                    Act::Late => pager.late(memory, host)?,
                    Act::Minor => pager.minor(memory, host)?,
                    _ => pager.guard(memory, host)?,
                }
            }
            _ => {
                self.settle()?;
                self.hands.act(self.guest.memory(), act, host)?;
            }
        }
        Ok(())
    }

    fn exchange(&mut self, first: u64, second: u64, pages: u64) -> Result<(), Trouble> {
        self.settle()?;
        let (first, second) = (Span::new(first, pages), Span::new(second, pages));
        Ok(self.hands.exchange(self.guest.memory(), first, second)?)
    }

    fn stored(&mut self, act: Act) {
        if act == Act::Merge {
            self.hands.wait_for_merge();
        }
    }

    fn convert(&mut self, guest: Span, private: bool) -> Result<(), Trouble> {
        Ok(self.guest.convert(guest.at, guest.pages, private)?)
    }

    fn audit(&mut self, pages: u64, quiet: bool) -> Result<(), Trouble> {
        match &mut self.counters {
            Some(counters) => counters.check(&self.guest, pages, quiet),
            None => Ok(()),
        }
    }

    fn peek(&self, host: u64) -> Stamp {
        let at = host * self.guest.page_size();
        let word = |at| self.guest.memory().read(at).unwrap_or(HOLE);
        Stamp { step: word(at), at: word(at + 8) }
    }

    fn poke(&mut self, host: u64, stamp: Stamp) {
        let (at, memory) = (host * self.guest.page_size(), self.guest.memory());
        for (word, value) in [(0, stamp.step), (8, stamp.at), (16, arch::RETURNS)] {
            memory.write(at + word, value);
        }
    }

    fn give_up(&mut self) {
        if !self.threads.iter().any(|thread| thread.runs) {
            return;
        }
        self.guest.give_up();
        let begin = Instant::now();
        for vcpu in 0..self.threads.len() {
            // A signal that comes just before KVM_RUN interrupts nothing: it is sent again.
            while self.threads[vcpu].runs && begin.elapsed() < self.patience {
                self.kick(vcpu, 1);
                let thread = &mut self.threads[vcpu];
                let answer = thread.answers.recv_timeout(Duration::from_millis(1));
                thread.runs = matches!(answer, Err(RecvTimeoutError::Timeout));
            }
        }
    }
}

impl Drop for KvmSystem {
    fn drop(&mut self) {
        self.give_up();
        for thread in &mut self.threads {
            let _ = thread.orders.send(Order::Leave);
            // One that does not end holds the guest; the process goes on without it.
            if let Some(handle) = thread.handle.take().filter(|_| !thread.runs) {
                let _ = handle.join();
            }
        }
        // Without it, a page that is late would never come.
        let _ = self.settle();
    }
}

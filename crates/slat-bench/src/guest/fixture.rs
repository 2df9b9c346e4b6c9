//! A machine, its memory, and guests that run on it one after the other.

use crate::format::{LARGEST, TableFormat, TablesArgs};
use anyhow::Context;
use serde_json::{Map, Value, json};
use slat::{Access, Format, Gpa, GpaRange, Hpa, Memory, PageSize, Vmid};
use slat_guest::{
    Backing, Config, Guest, Hva, MemslotId, MemslotSpec, NoPage, Page, TABLE_PAGES, Worker,
};
use slat_lab::failure::bad_input;
use slat_lab::session::Session;
use slat_lab::size::Size;
use slat_sim::arch::Arch;
use slat_sim::fast::FastMachine;

/// Bytes of the smallest page of any format: host memory is touched in steps of it.
const SMALLEST: u64 = 4096;
/// Guest address of the guests' memory.
pub const GUEST_BASE: u64 = 4 << 30;
/// Host virtual address of the memory, with the same alignment.
const HOST_BASE: u64 = 0x7000_0000_0000;
/// The only memslot.
pub const SLOT: MemslotId = MemslotId(0);
/// VMID of the tables.
pub const VMID: Vmid = Vmid(1);

/// Size of a guest, and of the host memory for it.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Bytes of guest memory.
    pub memory: u64,
    /// Bytes of host memory. If there is less than guest memory, guest addresses wrap around in it.
    pub host: u64,
    /// Size of the blocks that back it.
    pub block: PageSize,
    /// The smallest page of the tables.
    pub page: PageSize,
    /// Number of vCPUs.
    pub vcpus: u16,
    /// Whether the host's memory is resident before the measurement.
    pub resident: bool,
}

impl Shape {
    /// Returns the shape of a guest whose memory is all resident, for tables of `format`.
    ///
    /// # Errors
    /// Memory is no multiple of the blocks.
    pub fn new(
        memory: Size,
        format: TableFormat,
        block: PageSize,
        vcpus: u16,
    ) -> anyhow::Result<Self> {
        let (bytes, page) = (memory.bytes(), format.leaves()[0]);
        // A word of the log covers 64 pages.
        let step = Size(block.bytes().max(64 * page.bytes()).max(2 << 20));
        if !bytes.is_multiple_of(step.bytes()) {
            return Err(bad_input(format!(
                "--memory {memory} is no multiple of {step}, in which the host has it; take one"
            )));
        }
        Ok(Self { memory: bytes, host: bytes, block, page, vcpus, resident: true })
    }

    /// Returns the bytes of tables for all memory, full caches of all threads, and tables that wait
    /// to be freed.
    fn table_bytes(&self) -> u64 {
        let threads = u64::from(self.vcpus) + 8;
        // If not all memory is resident, nothing is split.
        let leaf = if self.resident { self.page.bytes() } else { self.block.bytes() };
        3 * (self.memory / leaf * 8)
            + (self.memory >> 16)
            + threads * (TABLE_PAGES as u64 + 8) * self.page.bytes()
            + (8 << 20)
    }
}

/// The host's memory for the guest: one piece, in blocks.
#[derive(Clone, Copy, Debug)]
pub struct Ram {
    base: u64,
    bytes: u64,
    block: PageSize,
}

impl Backing for Ram {
    fn page(&self, host: Hva, _: Access) -> Result<Page, NoPage> {
        let offset = host.0.checked_sub(HOST_BASE).ok_or(NoPage::Never)? % self.bytes;
        let hpa = Hpa(self.base + offset);
        let (write, execute) = (true, true);
        Ok(Page { hpa, block: self.block, write, execute, memory: Memory::Normal })
    }
}

/// A guest on a fixture's machine.
pub type TheGuest<'p, F, A> = Guest<'p, F, FastMachine<A>, Ram>;
/// A thread that works on the guest's memory.
pub type TheWorker<'w, F, A> = Worker<'w, F, FastMachine<A>, Ram>;

/// A machine with memory, on which guests run one after the other.
pub struct Fixture<F, A: Arch> {
    format: F,
    machine: FastMachine<A>,
    /// The shape of its guests.
    pub shape: Shape,
    params: Map<String, Value>,
}

impl<F: Format, A: Arch> Fixture<F, A> {
    /// Makes a machine for guests of `shape`.
    ///
    /// # Errors
    /// There is too little memory.
    pub fn new(
        format: F,
        arch: A,
        tables: &TablesArgs,
        shape: Shape,
        session: &Session,
    ) -> anyhow::Result<Self> {
        let table_bytes = shape.table_bytes();
        let available = session.memory_available();
        let needed = if shape.resident { shape.host + table_bytes } else { table_bytes };
        if needed > available / 10 * 9 {
            return Err(bad_input(format!(
                "a guest of {} takes {} MiB, and this machine has {} MiB free; take a smaller \
                 --memory",
                Size(shape.memory),
                needed >> 20,
                available >> 20
            )));
        }
        let machine = FastMachine::new(arch, shape.vcpus.into(), shape.host, table_bytes)
            .context("the host does not map the guest's memory; take a smaller --memory")?;
        if shape.resident {
            // Small pages work, too.
            let _ = machine.set_huge_pages(true);
            if machine.populate(machine.memory_base(), shape.host).is_err() {
                for at in (0..shape.host).step_by(SMALLEST as usize) {
                    machine.write_host(Hpa(machine.memory_base().0 + at), 0);
                }
            }
        } else {
            let _ = machine.set_huge_pages(false);
        }
        let mut params: Map<String, Value> = [
            ("memory", json!(shape.memory)),
            ("vcpus", json!(shape.vcpus)),
            ("backing", json!(Size(shape.block.bytes()).to_string())),
            ("format", json!(tables.format.to_string())),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into_iter()
        .collect();
        if tables.format.is_arm() {
            params.insert("bbm".to_owned(), json!(tables.bbm()?));
        }
        Ok(Self { format, machine, shape, params })
    }

    /// Returns the parameters that two comparable results must share.
    pub fn params(&self) -> Map<String, Value> {
        self.params.clone()
    }

    /// Returns the machine.
    pub const fn machine(&self) -> &FastMachine<A> {
        &self.machine
    }

    /// Returns the default configuration of a guest.
    pub fn config(&self) -> Config {
        let mut sizes = (0..=F::LARGEST_LEAF).rev().map(F::size).filter(|size| *size <= LARGEST);
        Config::new(self.shape.vcpus, sizes.next().unwrap_or(F::size(0)))
    }

    /// Makes a guest with all of its memory, calls `work` with it, and destroys it.
    ///
    /// # Errors
    /// Errors of `work`, or of making the guest.
    pub fn with_guest<R>(
        &self,
        config: Config,
        work: impl FnOnce(&TheGuest<'_, F, A>) -> anyhow::Result<R>,
    ) -> anyhow::Result<R> {
        let ram = Ram {
            base: self.machine.memory_base().0,
            bytes: self.shape.host,
            block: self.shape.block,
        };
        let bits = self.machine.arch().address_bits();
        let guest = Guest::new(self.format, VMID, bits, &self.machine, ram, config)
            .context("the guest cannot be made")?;
        let result = self.change_slot(&guest, false).and_then(|()| work(&guest));
        // SAFETY: CPUs are borrowed by runners, which have ended with `work`, so none has loaded
        // the guest's tables.
        unsafe { guest.destroy() };
        result
    }

    /// Makes the memslot, or begins or ends its log.
    pub fn change_slot(&self, guest: &TheGuest<'_, F, A>, log: bool) -> anyhow::Result<()> {
        let mut worker = Worker::new(guest)?;
        worker.set_memslot(self.memslot(log)).context("the guest's memslot cannot be changed")?;
        Ok(())
    }

    /// Returns the specification of the memslot.
    pub const fn memslot(&self, log_dirty: bool) -> MemslotSpec {
        MemslotSpec {
            log_dirty,
            ..MemslotSpec::new(SLOT, Gpa(GUEST_BASE), self.shape.memory, Hva(HOST_BASE))
        }
    }

    /// Returns the number of pages of the guest.
    pub const fn pages(&self) -> u64 {
        self.shape.memory >> F::PAGE_SHIFT
    }

    /// Returns the pages of one of `of` equal shares.
    pub fn share(&self, number: u64, of: u64) -> std::ops::Range<u64> {
        let begin =
            |number: u64| (u128::from(self.pages()) * u128::from(number) / u128::from(of)) as u64;
        begin(number)..begin(number + 1)
    }

    /// Returns the guest address of a page.
    pub const fn gpa(&self, page: u64) -> u64 {
        GUEST_BASE + (page << F::PAGE_SHIFT)
    }

    /// Returns the range of `pages` from `first` on.
    pub fn range(&self, first: u64, pages: u64) -> GpaRange {
        GpaRange::new(Gpa(self.gpa(first)), pages << F::PAGE_SHIFT).expect("some pages")
    }

    /// Returns the first word of a page, as the host sees it.
    pub fn first_word(&self, page: u64) -> u64 {
        let offset = (page << F::PAGE_SHIFT) % self.shape.host;
        self.machine.read_host(Hpa(self.machine.memory_base().0 + offset))
    }
}

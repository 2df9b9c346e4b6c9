//! The firmware's services: screen, file, other CPUs, and the end.

#[cfg(target_arch = "aarch64")]
use super::psci;
use core::cell::UnsafeCell;
use core::ffi::c_void;
use core::fmt::Write;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use core::time::Duration;
#[cfg(target_arch = "x86_64")]
use uefi::Event;
use uefi::boot;
#[cfg(target_arch = "x86_64")]
use uefi::boot::{EventType, Tpl};
use uefi::proto::pi::mp::MpServices;
use uefi::runtime::{self, ResetType};
#[cfg(target_arch = "aarch64")]
use uefi::table::cfg::ConfigTableEntry;
use uefi::{CStr16, Status};

/// Bytes of the report.
const MOST: usize = 256 << 10;

/// The report. CPUs write to it in turns: the first one waits for another.
struct Report(UnsafeCell<[u8; MOST]>);

// SAFETY: bytes at and after `WRITTEN` belong to the CPU that moved it past them; the others are
// only read.
unsafe impl Sync for Report {}

static REPORT: Report = Report(UnsafeCell::new([0; MOST]));
static WRITTEN: AtomicUsize = AtomicUsize::new(0);
static SHOWN: AtomicUsize = AtomicUsize::new(0);
/// Another CPU works, for which the firmware has no services.
pub static ELSEWHERE: AtomicBool = AtomicBool::new(false);

/// Adds text to the report, and shows it if this CPU may.
pub fn print(text: &str) {
    let at = WRITTEN.fetch_add(text.len(), Ordering::SeqCst);
    for (n, byte) in text.bytes().enumerate().take_while(|(n, _)| at + n < MOST) {
        // SAFETY: inside, and of this call alone.
        unsafe { REPORT.0.get().cast::<u8>().add(at + n).write(byte) }
    }
    if !ELSEWHERE.load(Ordering::SeqCst) {
        show();
    }
}

fn report(from: usize) -> &'static str {
    let bytes = WRITTEN.load(Ordering::SeqCst).min(MOST) - from;
    // SAFETY: inside, and written.
    let text = unsafe { core::slice::from_raw_parts(REPORT.0.get().cast::<u8>().add(from), bytes) };
    core::str::from_utf8(text).unwrap_or("(text that is no text)")
}

/// Shows what is not on the screen.
fn show() {
    let from = SHOWN.swap(WRITTEN.load(Ordering::SeqCst).min(MOST), Ordering::SeqCst);
    uefi::system::with_stdout(|out| {
        for letter in report(from).chars() {
            let _ = if letter == '\n' { out.write_str("\r\n") } else { out.write_char(letter) };
        }
    });
}

/// Writes the report so far to the volume that the program came from.
pub fn save() -> bool {
    let write = || {
        let volume = boot::get_image_file_system(boot::image_handle()).ok()?;
        let path: &CStr16 = uefi::cstr16!("\\slat.txt");
        uefi::fs::FileSystem::new(volume).write(path, report(0).as_bytes()).ok()
    };
    write().is_some()
}

/// Saves the report and powers the machine off.
pub fn end() -> ! {
    if !save() {
        print("slat.txt cannot be written: take a photograph of the screen\n");
        boot::stall(Duration::from_secs(60));
    }
    runtime::reset(ResetType::SHUTDOWN, Status::SUCCESS, None)
}

#[cfg(target_arch = "aarch64")]
/// Returns which of the firmware's tables say that EL2 can call PSCI, or why it cannot: ACPI's
/// where there are some, else the devicetree.
pub fn can_call_psci() -> Result<&'static str, &'static str> {
    const DEVICETREE: uefi::Guid = uefi::guid!("b1b621d5-f19c-41a5-830b-d9152c69aae0");
    let [acpi, tree] = uefi::system::with_config_table(|entries| {
        [ConfigTableEntry::ACPI2_GUID, DEVICETREE].map(|guid| {
            entries.iter().find(|entry| entry.guid == guid).map(|entry| entry.address.addr())
        })
    });
    // SAFETY: the firmware's tables stay, in memory that is mapped at its own address.
    let read = |at: u64, bytes| unsafe {
        (at != 0).then(|| core::slice::from_raw_parts(at as *const u8, bytes))
    };
    match (acpi, tree) {
        (Some(rsdp), _) => psci::by_acpi(rsdp as u64, read).map(|()| "ACPI"),
        (None, Some(tree)) => {
            let size = read(tree as u64 + 4, 4).and_then(|size| size.try_into().ok());
            let size = size.map_or(0, u32::from_be_bytes) as usize;
            psci::by_devicetree(read(tree as u64, size).unwrap_or_default()).map(|()| "devicetree")
        }
        (None, None) => Err("the firmware has neither ACPI tables nor a devicetree"),
    }
}

/// The numbers of the other CPUs, as far as the firmware lends them.
pub fn others() -> core::ops::Range<usize> {
    let count = services().and_then(|mp| mp.get_number_of_processors().ok());
    1..count.map_or(1, |count| count.enabled)
}

fn services() -> Option<boot::ScopedProtocol<MpServices>> {
    let handle = boot::get_handle_for_protocol::<MpServices>().ok()?;
    boot::open_protocol_exclusive::<MpServices>(handle).ok()
}

extern "efiapi" fn call(work: *mut c_void) {
    // SAFETY: `on` and `beside` pass a function of this type.
    let work = unsafe { core::mem::transmute::<*mut c_void, fn()>(work) };
    work();
}

/// Runs `work` on another CPU and waits for it; returns whether it ended in time.
pub fn on(cpu: usize, work: fn()) -> bool {
    ELSEWHERE.store(true, Ordering::SeqCst);
    let limit = Some(Duration::from_secs(60));
    let done = services()
        .is_some_and(|mp| mp.startup_this_ap(cpu, call, work as *mut c_void, None, limit).is_ok());
    ELSEWHERE.store(false, Ordering::SeqCst);
    show();
    done
}

#[cfg(target_arch = "x86_64")]
/// Starts `work` on another CPU, beside this one; the event is signalled at its end.
pub fn beside(cpu: usize, work: fn()) -> Option<Event> {
    let mp = services()?;
    // SAFETY: no function is called at the event.
    let event =
        unsafe { boot::create_event(EventType::empty(), Tpl::CALLBACK, None, None) }.ok()?;
    // SAFETY: the copy is used by the firmware alone.
    let copy = unsafe { event.unsafe_clone() };
    mp.startup_this_ap(cpu, call, work as *mut c_void, Some(copy), None).ok()?;
    Some(event)
}

#[cfg(target_arch = "x86_64")]
/// Waits for an event of [`beside`], for a second at most.
pub fn wait(event: Event) {
    for _ in 0..1000 {
        // SAFETY: the copy is used by this call alone.
        if boot::check_event(unsafe { event.unsafe_clone() }) != Ok(false) {
            return;
        }
        boot::stall(Duration::from_millis(1));
    }
}

//! QEMU, driven from outside by its qtest protocol, and memory that both processes map.

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use slat::Hpa;
use std::cell::RefCell;
use std::ffi::c_void;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::thread;
use std::time::Duration;

/// Bytes of the machine's memory.
pub const MEMORY: usize = 64 << 20;

/// An architecture's machine: QEMU's program, and what its CPU starts with.
pub struct Board {
    pub program: &'static str,
    /// Where memory begins.
    pub memory: u64,
    /// Instructions that halt, and how far they are from the begin of the file of `bytes` bytes
    /// that QEMU takes for firmware.
    pub code: &'static [u8],
    pub at: usize,
    pub bytes: usize,
    pub options: &'static [&'static str],
}

/// A machine whose CPU halts at once.
pub struct Qemu {
    board: &'static Board,
    child: Child,
    lines: RefCell<(BufReader<UnixStream>, UnixStream)>,
    memory: *mut c_void,
}

impl Qemu {
    /// Starts the machine.
    ///
    /// `SLAT_QEMU` names a folder with the files of a package of a newer QEMU than is installed.
    pub fn start(board: &'static Board) -> Self {
        let newer = std::env::var_os("SLAT_QEMU").map(|folder| Path::new(&folder).join("usr"));
        let unpacked = newer.as_ref().map(|usr| usr.join("bin").join(board.program));
        let unpacked = unpacked.filter(|program| program.exists());
        let program = unpacked.clone().unwrap_or_else(|| board.program.into());
        let folder = tempfile::tempdir().unwrap();
        let [memory, socket, rom] =
            ["memory", "socket", "rom"].map(|name| folder.path().join(name));
        let file = File::options().read(true).write(true).create_new(true).open(&memory).unwrap();
        file.set_len(MEMORY as u64).unwrap();
        let mut firmware = vec![0; board.bytes];
        firmware[board.at..board.at + board.code.len()].copy_from_slice(board.code);
        fs::write(&rom, firmware).unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        let mut command = Command::new(&program);
        if let (Some(usr), true) = (newer, unpacked.is_some()) {
            command.arg("-L").arg(usr.join("share/qemu"));
        }
        command.args(board.options).args(["-nodefaults", "-no-user-config", "-display", "none"]);
        command.args(["-device", "edu,addr=4.0,dma_mask=0xffffffffffffffff"]);
        // An instruction takes a microsecond, and sleep no time: the device's delays pass at once.
        command.args(["-accel", "tcg", "-icount", "shift=10,sleep=off"]);
        command.arg("-bios").arg(&rom).args(["-m", "64M"]);
        let path = memory.display();
        let backend = format!("memory-backend-file,id=mem,size={MEMORY},mem-path={path},share=on");
        command.args(["-object", &backend, "-qtest-log", "none"]);
        command.args(["-qtest", &format!("unix:{}", socket.display())]);
        // QEMU tells each refusal on stderr.
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // SAFETY: `prctl` may be called between fork and exec, and nothing is allocated.
        unsafe {
            command.pre_exec(|| {
                let kill = Some(rustix::process::Signal::KILL);
                Ok(rustix::process::set_parent_process_death_signal(kill)?)
            });
        }
        let name = program.display();
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{name}: {error}"));
        listener.set_nonblocking(true).unwrap();
        let stream = loop {
            match listener.accept() {
                Ok((stream, _)) => break stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => panic!("{error}"),
            }
            let ended = child.try_wait().unwrap();
            assert!(ended.is_none(), "{name} does not start; is it new enough for this unit?");
            thread::sleep(Duration::from_millis(2));
        };
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let memory = unsafe {
            mmap(std::ptr::null_mut(), MEMORY, rights, MapFlags::SHARED, &file, 0).unwrap()
        };
        let lines = RefCell::new((BufReader::new(stream.try_clone().unwrap()), stream));
        let qemu = Self { board, child, lines, memory };
        // QEMU has opened its files once it answers; the folder may go.
        qemu.read32(0);
        qemu
    }

    /// Sends a line, and returns the number that QEMU answers.
    fn ask(&self, text: &str) -> u64 {
        let (answers, questions) = &mut *self.lines.borrow_mut();
        questions.write_all(format!("{text}\n").as_bytes()).unwrap();
        loop {
            let mut line = String::new();
            assert!(answers.read_line(&mut line).unwrap() > 0, "QEMU has ended: {text}");
            if line.starts_with("IRQ") {
                continue;
            }
            let rest = line.trim().strip_prefix("OK").unwrap_or_else(|| panic!("{text}: {line}"));
            let number = rest.trim().strip_prefix("0x");
            return number.map_or(0, |hex| u64::from_str_radix(hex, 16).unwrap());
        }
    }

    /// Reads a register.
    pub fn read32(&self, at: u64) -> u64 {
        self.ask(&format!("readl {at:#x}"))
    }

    /// Reads a register.
    pub fn read64(&self, at: u64) -> u64 {
        self.ask(&format!("readq {at:#x}"))
    }

    /// Writes a register.
    pub fn write32(&self, at: u64, value: u64) {
        self.ask(&format!("writel {at:#x} {value:#x}"));
    }

    /// Writes a register.
    pub fn write64(&self, at: u64, value: u64) {
        self.ask(&format!("writeq {at:#x} {value:#x}"));
    }

    /// Places a device's registers, and lets it access memory.
    pub fn enable(&self, configuration: u64, registers: u64) {
        self.write32(configuration + 0x10, registers);
        self.write32(configuration + 4, 6);
    }

    /// Writes an I/O port.
    pub fn out32(&self, port: u64, value: u64) {
        self.ask(&format!("outl {port:#x} {value:#x}"));
    }

    /// Returns the place of memory in this process.
    pub fn word(&self, at: Hpa) -> *mut u64 {
        let offset = at.0.wrapping_sub(self.board.memory);
        assert!(at.0.is_multiple_of(8) && offset < MEMORY as u64, "{at:?}");
        self.memory.cast::<u8>().wrapping_add(offset as usize).cast()
    }

    /// Reads memory.
    pub fn get(&self, at: u64) -> u64 {
        // SAFETY: aligned and inside the mapping, of which there is no reference.
        unsafe { self.word(Hpa(at)).read_volatile() }
    }

    /// Writes memory.
    pub fn put(&self, at: u64, value: u64) {
        // SAFETY: as for `get`.
        unsafe { self.word(Hpa(at)).write_volatile(value) }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
        // SAFETY: the mapping was made by `start`, and nothing uses it any more.
        let _ = unsafe { munmap(self.memory, MEMORY) };
    }
}

/// QEMU's device `edu`, which copies between memory and its buffer of 4 KiB.
pub struct Edu {
    qemu: Rc<Qemu>,
    registers: u64,
}

impl Edu {
    /// The device, with its registers at `registers`.
    pub const fn new(qemu: Rc<Qemu>, registers: u64) -> Self {
        Self { qemu, registers }
    }

    /// Where its buffer is, as its registers name it.
    const BUFFER: u64 = 0x40000;

    fn copy(&self, from: u64, to: u64, command: u64) {
        for (register, value) in [(0x80, from), (0x88, to), (0x90, 8), (0x98, command)] {
            self.qemu.write64(self.registers + register, value);
        }
        while self.qemu.read64(self.registers + 0x98) & 1 != 0 {}
    }

    /// Reads 8 bytes into the buffer.
    pub fn fill(&self, at: u64) {
        self.copy(at, Self::BUFFER, 1);
    }

    /// Writes 8 bytes out of the buffer.
    pub fn spill(&self, at: u64) {
        self.copy(Self::BUFFER, at, 3);
    }
}

//! Many small guests to watch, each in its own process: `cargo run -p slat-kvm --example guests
//! -- GUESTS VCPUS MEBIBYTES`.
//!
//! Each guest writes to all of its memory twice a second, from threads with names of vCPUs'
//! threads. It loses a page now and then, and then has a fault. The guests end with this process:
//! on Ctrl-C, or at the end of its input.

use rustix::mm::{Advice, madvise};
use slat_kvm::guest::{Guest, Shape};
use slat_kvm::work::{Touch, Work};
use std::process::{Command, Stdio};
use std::time::Duration;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<u64> = std::env::args().skip(1).map_while(|word| word.parse().ok()).collect();
    let [guests, vcpus, mebibytes] = words[..] else {
        return Err("usage: guests GUESTS VCPUS MEBIBYTES".into());
    };
    if guests > 1 {
        let again = |_| {
            let mut one = Command::new(std::env::current_exe()?);
            one.args(["1", &vcpus.to_string(), &mebibytes.to_string()])
                .stdin(Stdio::piped())
                .spawn()
        };
        // Dropping these at the end closes their input.
        let all = (0..guests).map(again).collect::<Result<Vec<_>, _>>()?;
        println!("{} guests run; the end of the input ends them", all.len());
        std::io::read_to_string(std::io::stdin())?;
        return Ok(());
    }
    let shape = Shape { memory: mebibytes << 20, vcpus: vcpus as usize, ..Shape::default() };
    let (guest, vcpus) = Guest::new(&shape)?;
    for (index, mut vcpu) in vcpus.into_iter().enumerate() {
        let run = move || {
            loop {
                vcpu.load(&Work::each_page(Touch::Write)).and_then(|()| vcpu.run()).ok();
                std::thread::sleep(Duration::from_millis(500));
            }
        };
        std::thread::Builder::new().name(format!("vcpu{index}")).spawn(run)?;
    }
    let begin = guest.memory().host_address();
    std::thread::spawn(move || {
        loop {
            // SAFETY: the page is guest memory, which the guest may read or write at any time. No
            // code of this process keeps a reference into it.
            let taken =
                unsafe { madvise(begin as *mut std::ffi::c_void, 4096, Advice::LinuxDontNeed) };
            if taken.is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(500));
        }
    });
    std::io::read_to_string(std::io::stdin())?;
    // Threads still use the guest, so it is not dropped.
    std::process::exit(0);
}

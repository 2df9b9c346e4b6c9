//! Selects the linker script of each program, which places it in memory. Only programs for the
//! machine without an operating system have one.

fn main() {
    let here = std::env::var("CARGO_MANIFEST_DIR").expect("cargo says where it builds");
    let bare = std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "none");
    for (program, script) in [("slat-hypervisor", "link.ld"), ("slat-probe", "probe.ld")] {
        if bare {
            println!("cargo:rustc-link-arg-bin={program}=-T{here}/{script}");
        }
        println!("cargo:rerun-if-changed={script}");
    }
}

//! Where a walker's program lies in memory: its linker script, on the bare machine only.

fn main() {
    let here = std::env::var("CARGO_MANIFEST_DIR").expect("cargo says where it builds");
    let target = |name: &str| std::env::var(name).unwrap_or_default();
    if target("CARGO_CFG_TARGET_OS") == "none" {
        match target("CARGO_CFG_TARGET_ARCH").as_str() {
            "x86_64" => {
                println!("cargo:rustc-link-arg-bins=-T{here}/npt.ld");
                // No loader would relocate the program.
                println!("cargo:rustc-link-arg-bins=--no-pie");
            }
            _ => println!("cargo:rustc-link-arg-bins=-T{here}/riscv.ld"),
        }
    }
    if target("CARGO_CFG_TARGET_ARCH") == "powerpc64" {
        println!("cargo:rustc-link-arg-bins=-T{here}/power.ld");
        println!("cargo:rustc-link-arg-bins=-static");
    }
    println!("cargo:rerun-if-changed=npt.ld");
    println!("cargo:rerun-if-changed=power.ld");
    println!("cargo:rerun-if-changed=riscv.ld");
}

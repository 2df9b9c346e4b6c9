//! What the target's compiled code expects of a C library and of an unwinder.

/// # Safety
/// C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
    for at in 0..bytes {
        // SAFETY: the caller's. Volatile, lest this become a call of itself.
        unsafe { to.add(at).write_volatile(from.add(at).read_volatile()) }
    }
    to
}

/// # Safety
/// C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
    if to.addr() <= from.addr() {
        // SAFETY: a copy upwards reads each byte before it is overwritten.
        return unsafe { memcpy(to, from, bytes) };
    }
    for at in (0..bytes).rev() {
        // SAFETY: the caller's.
        unsafe { to.add(at).write_volatile(from.add(at).read_volatile()) }
    }
    to
}

/// # Safety
/// C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, byte: i32, bytes: usize) -> *mut u8 {
    for at in 0..bytes {
        // SAFETY: the caller's.
        unsafe { to.add(at).write_volatile(byte as u8) }
    }
    to
}

/// # Safety
/// C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(left: *const u8, right: *const u8, bytes: usize) -> i32 {
    // SAFETY: the caller's.
    let pair = |at| unsafe { (left.add(at).read_volatile(), right.add(at).read_volatile()) };
    let different = (0..bytes).map(pair).find(|(left, right)| left != right);
    different.map_or(0, |(left, right)| i32::from(left) - i32::from(right))
}

/// # Safety
/// C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(left: *const u8, right: *const u8, bytes: usize) -> i32 {
    // SAFETY: the caller's.
    unsafe { memcmp(left, right, bytes) }
}

#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

#[unsafe(no_mangle)]
extern "C" fn _Unwind_Resume() {}

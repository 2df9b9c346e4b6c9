//! The bits of `enum kvm_pgtable_prot`.

use slat::{Access, Accesses, Attributes, Execute, Memory};

/// `KVM_PGTABLE_PROT_X`
pub const EXECUTE: u64 = 1 << 0;
/// `KVM_PGTABLE_PROT_W`
pub const WRITE: u64 = 1 << 1;
/// `KVM_PGTABLE_PROT_R`
pub const READ: u64 = 1 << 2;
/// `KVM_PGTABLE_PROT_DEVICE`
pub const DEVICE: u64 = 1 << 3;
/// `KVM_PGTABLE_PROT_NORMAL_NC`
pub const NORMAL_NC: u64 = 1 << 4;

/// All bits that a leaf can have here: bits for software are for nested guests only, whose tables
/// stay in C.
const KNOWN: u64 = EXECUTE | WRITE | READ | DEVICE | NORMAL_NC;

/// Returns the attributes of a leaf; `None` for bits that KVM refuses, or that only nested guests
/// have.
pub(crate) fn attributes(prot: u64) -> Option<Attributes> {
    let memory = match prot & (DEVICE | NORMAL_NC) {
        0 => Memory::Normal,
        _ if prot & EXECUTE != 0 => return None,
        DEVICE => Memory::Device,
        NORMAL_NC => Memory::NonCacheable,
        _ => return None,
    };
    let execute = if prot & EXECUTE != 0 { Execute::All } else { Execute::None };
    let (read, write) = (prot & READ != 0, prot & WRITE != 0);
    // A leaf that may be written counts as written: KVM logs by faults.
    let attributes = Attributes { read, write, execute, memory, dirty: write, ..Attributes::RAM };
    (prot & !KNOWN == 0).then_some(attributes)
}

/// Returns the accesses that a fault on a present leaf asks for; `None` for bits of nested guests.
pub(crate) fn accesses(prot: u64) -> Option<Accesses> {
    let rights = [(READ, Access::Read), (WRITE, Access::Write), (EXECUTE, Access::Execute)];
    let given = rights.into_iter().filter(|(right, _)| prot & right != 0);
    let accesses = given.fold(Accesses::NONE, |accesses, (_, access)| accesses.with(access));
    (prot & !KNOWN == 0).then_some(accesses)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_kvm_refuses_is_refused() {
        assert!(attributes(READ | DEVICE | NORMAL_NC).is_none());
        assert!(attributes(READ | EXECUTE | DEVICE).is_none());
        assert!(attributes(READ | 1 << 55).is_none() && accesses(WRITE | 1 << 58).is_none());
        let device = attributes(READ | WRITE | DEVICE).unwrap();
        assert_eq!((device.memory, device.execute), (Memory::Device, Execute::None));
    }

    #[test]
    fn a_leaf_that_may_be_written_is_dirty() {
        assert!(attributes(READ | WRITE).unwrap().dirty && !attributes(READ).unwrap().dirty);
        assert_eq!(
            accesses(WRITE | EXECUTE),
            Some(Accesses::NONE.with(Access::Write).with(Access::Execute))
        );
    }
}

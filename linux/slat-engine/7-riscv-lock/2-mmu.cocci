// SPDX-License-Identifier: GPL-2.0-only
//
// file: arch/riscv/kvm/mmu.c
// versions: ..6.15
// leaves 6: write_lock(&kvm->mmu_lock)
// leaves 6: write_unlock(&kvm->mmu_lock)
// leaves 1: cond_resched_rwlock_write(&kvm->mmu_lock)

@@
expression kvm;
@@
-spin_lock(&kvm->mmu_lock)
+write_lock(&kvm->mmu_lock)

@@
expression kvm;
@@
-spin_unlock(&kvm->mmu_lock)
+write_unlock(&kvm->mmu_lock)

@@
expression kvm;
@@
-cond_resched_lock(&kvm->mmu_lock)
+cond_resched_rwlock_write(&kvm->mmu_lock)

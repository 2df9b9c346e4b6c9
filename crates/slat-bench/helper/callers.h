/* The callers as the driver calls them; trees name and type some of them differently. */
#ifndef SLAT_CALLERS_H
#define SLAT_CALLERS_H

#include <asm/kvm_pgtable.h>
#include <asm/stage2_pgtable.h>

void kvm_arch_mmu_enable_log_dirty_pt_masked(struct kvm *kvm, struct kvm_memory_slot *slot,
					     gfn_t gfn_offset, unsigned long mask);
int slat_split(struct kvm *kvm, u64 start, u64 end);
void slat_protect(struct kvm *kvm, u64 start, u64 end);
int slat_unmap(struct kvm *kvm, u64 start, u64 end);
int slat_flush(struct kvm *kvm, u64 start, u64 end);

#endif

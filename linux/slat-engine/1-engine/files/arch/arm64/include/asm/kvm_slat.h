/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef __ARM64_KVM_SLAT_H__
#define __ARM64_KVM_SLAT_H__

/*
 * Stage 2 of a VM on Slat's engine, or on the page table code of KVM: each
 * function looks at the VM. See arch/arm64/kvm/slat.c.
 */
#include <linux/version.h>

#include <asm/kvm_pgtable.h>

/* Since then mmu.c chooses between sets of functions, and destroys by pieces. */
#define SLAT_KVM_PGT_FN	(LINUX_VERSION_CODE >= KERNEL_VERSION(7, 0, 0))

int slat_kvm_pgtable_stage2_init(struct kvm_pgtable *pgt, struct kvm_s2_mmu *mmu,
				 struct kvm_pgtable_mm_ops *mm_ops);
void slat_kvm_refused(const char *why);
#if SLAT_KVM_PGT_FN
void slat_kvm_pgtable_stage2_destroy_range(struct kvm_pgtable *pgt, u64 addr, u64 size);
void slat_kvm_pgtable_stage2_destroy_pgd(struct kvm_pgtable *pgt);
void slat_kvm_pgtable_stage2_mkyoung(struct kvm_pgtable *pgt, u64 addr,
				     enum kvm_pgtable_walk_flags flags);
int slat_kvm_pgtable_stage2_relax_perms(struct kvm_pgtable *pgt, u64 addr,
					enum kvm_pgtable_prot prot,
					enum kvm_pgtable_walk_flags flags);
/* The tables that C unlinks are C's. */
#define slat_kvm_pgtable_stage2_free_unlinked kvm_pgtable_stage2_free_unlinked
#else
void slat_kvm_pgtable_stage2_destroy(struct kvm_pgtable *pgt);
kvm_pte_t slat_kvm_pgtable_stage2_mkyoung(struct kvm_pgtable *pgt, u64 addr);
int slat_kvm_pgtable_stage2_relax_perms(struct kvm_pgtable *pgt, u64 addr,
					enum kvm_pgtable_prot prot);
#endif
int slat_kvm_pgtable_stage2_map(struct kvm_pgtable *pgt, u64 addr, u64 size, u64 phys,
				enum kvm_pgtable_prot prot, void *mc,
				enum kvm_pgtable_walk_flags flags);
int slat_kvm_pgtable_stage2_unmap(struct kvm_pgtable *pgt, u64 addr, u64 size);
int slat_kvm_pgtable_stage2_wrprotect(struct kvm_pgtable *pgt, u64 addr, u64 size);
bool slat_kvm_pgtable_stage2_test_clear_young(struct kvm_pgtable *pgt, u64 addr,
					      u64 size, bool mkold);
int slat_kvm_pgtable_stage2_flush(struct kvm_pgtable *pgt, u64 addr, u64 size);
int slat_kvm_pgtable_stage2_split(struct kvm_pgtable *pgt, u64 addr, u64 size,
				  struct kvm_mmu_memory_cache *mc);

#endif /* __ARM64_KVM_SLAT_H__ */

/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef __RISCV_KVM_SLAT_H__
#define __RISCV_KVM_SLAT_H__

/*
 * The G-stage of a VM on Slat's engine: see arch/riscv/kvm/slat.c.
 */
#include <linux/kvm_types.h>

struct kvm;
struct kvm_gfn_range;
struct kvm_memory_slot;
struct kvm_vcpu;

struct kvm_slat {
	/* It is on the engine. Constant for a VM. */
	bool is_on;

	/* The tables; NULL when the VM has given them back */
	void *vm;

	/* Dirty logs take mmu_lock for reading. Constant for a VM. */
	bool read_lock;

	/* Blocks are split by so many bytes at a time; 0: when a vCPU writes */
	u64 split_chunk;
	struct kvm_mmu_memory_cache split_cache;
};

#define slat_is_on(kvm)	((kvm)->arch.slat.is_on)

/* C protects when a log begins, whatever is set in it. */
#define KVM_DIRTY_LOG_MANUAL_CAPS \
	(KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET)

/* Returns whether the VM is on the engine, or could not be made. */
bool slat_alloc(struct kvm *kvm, unsigned long gpa_bits, int *ret);
void slat_free(struct kvm *kvm);
int slat_map_fault(struct kvm_vcpu *vcpu, struct kvm_memory_slot *slot, gpa_t gpa,
		   unsigned long hva, bool is_write);
int slat_map_device(struct kvm *kvm, struct kvm_mmu_memory_cache *mc, gpa_t gpa,
		    phys_addr_t hpa, bool writable);
void slat_unmap(struct kvm *kvm, gpa_t start, gpa_t size, bool may_block);
void slat_wp(struct kvm *kvm, gpa_t start, gpa_t end);
void slat_log(struct kvm *kvm, const struct kvm_memory_slot *old,
	      const struct kvm_memory_slot *new);
void slat_split(struct kvm *kvm, gpa_t start, gpa_t end);
bool slat_age(struct kvm *kvm, struct kvm_gfn_range *range, bool clear);
int slat_capability(struct kvm *kvm, long ext);
void slat_limit_mode(unsigned long *mode, unsigned long *levels);
unsigned long slat_limit_vmids(unsigned long bits);
void slat_left_c(void);
bool slat_ages_lockless(void);
#define kvm_arch_lockless_aging(kvm)	slat_ages_lockless()

void kvm_arch_dirty_log_lock(struct kvm *kvm);
void kvm_arch_dirty_log_unlock(struct kvm *kvm);
#define kvm_arch_dirty_log_lock kvm_arch_dirty_log_lock
#define kvm_arch_dirty_log_unlock kvm_arch_dirty_log_unlock

#endif /* __RISCV_KVM_SLAT_H__ */

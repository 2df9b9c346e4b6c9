// SPDX-License-Identifier: GPL-2.0-only
/*
 * Stage 2 of a VM on Slat's engine: the functions that KVM calls, the choice
 * between both implementations, and what the engine needs of Linux.
 *
 * The engine is Rust, in slat_rust.o. It takes no lock and does not know which
 * threads are in the tables, so a table that it unlinks is freed after an RCU
 * grace period. Readers are under mmu_lock, which is an RCU read-side critical
 * section, or call rcu_read_lock().
 */
#include <linux/kvm_host.h>
#include <linux/moduleparam.h>
#include <linux/rcupdate.h>
#include <linux/sched.h>
#include <linux/slab.h>

#include <asm/kvm_asm.h>
#include <asm/kvm_mmu.h>
#include <asm/kvm_pgtable.h>
#include <asm/kvm_slat.h>

/* VMs that are made from now on use the engine. */
static bool slat = true;
module_param(slat, bool, 0644);
MODULE_PARM_DESC(slat, "New VMs have stage-2 page tables of Slat's engine");

/* VMs made on the engine, and VMs that stayed on C although slat was set. */
static atomic_long_t slat_vms, slat_refused;

enum slat_op { MAP, UNMAP, WRPROTECT, MKYOUNG, AGE, RELAX, FLUSH, SPLIT, NR_OPS };

static const char *const slat_names[NR_OPS] = {
	"map", "unmap", "wrprotect", "mkyoung", "age", "relax", "flush", "split",
};

/* Calls of the engine. */
static atomic_long_t slat_calls[NR_OPS];

static int slat_get_long(char *buffer, const struct kernel_param *kp)
{
	return sysfs_emit(buffer, "%ld\n", atomic_long_read(kp->arg));
}

static int slat_get_calls(char *buffer, const struct kernel_param *kp)
{
	int op, len = 0;

	for (op = 0; op < NR_OPS; op++)
		len += sysfs_emit_at(buffer, len, "%s%s %ld", op ? ", " : "", slat_names[op],
				     atomic_long_read(&slat_calls[op]));
	return len + sysfs_emit_at(buffer, len, "\n");
}

static const struct kernel_param_ops slat_long_ops = { .get = slat_get_long };
static const struct kernel_param_ops slat_calls_ops = { .get = slat_get_calls };

module_param_cb(slat_vms, &slat_long_ops, &slat_vms, 0444);
module_param_cb(slat_refused, &slat_long_ops, &slat_refused, 0444);
module_param_cb(slat_calls, &slat_calls_ops, NULL, 0444);

/* The engine: crates/slat-linux/kernel/entry.rs. */
struct slat_config {
	void *mmu;
	u64 offset;
	u32 ipa_bits;
	u32 output_bits;
	bool wide;
	bool forced_write_back;
	s8 start_level;
};

size_t slat_kvm_bytes(void);
int slat_kvm_init(void *vm, const struct slat_config *config, u64 *root);
bool slat_kvm_destroy_some(void *vm, size_t most);
void slat_kvm_destroy(void *vm);
int slat_kvm_map(void *vm, u64 addr, u64 size, u64 phys, u64 prot, void *mc);
int slat_kvm_unmap(void *vm, u64 addr, u64 size);
int slat_kvm_relax(void *vm, u64 addr, u64 prot);
u64 slat_kvm_mkyoung(void *vm, u64 addr);
int slat_kvm_wrprotect(void *vm, u64 addr, u64 size);
bool slat_kvm_age(void *vm, u64 addr, u64 size, bool clear);
int slat_kvm_flush(void *vm, u64 addr, u64 size);
int slat_kvm_split(void *vm, u64 addr, u64 size, void *mc);
bool slat_kvm_has_retired(void *vm);
void slat_kvm_take_retired(void *vm, u64 words[2]);
void slat_kvm_free_retired(u64 offset, const u64 words[2]);

/* What it calls. */
u64 slat_c_alloc(size_t bytes);
void slat_c_free(u64 pa, size_t bytes);
u64 slat_c_take(struct kvm_mmu_memory_cache *mc);
void slat_c_flush_all(struct kvm_s2_mmu *mmu);
void slat_c_flush_range(struct kvm_s2_mmu *mmu, u64 ipa, u64 bytes);
void slat_c_flush_ipa(struct kvm_s2_mmu *mmu, u64 ipa, int level);
void slat_c_flush_local(struct kvm_s2_mmu *mmu, u64 ipa, int level);
void slat_c_maintain(u64 pa, u64 bytes, bool instructions);
void __noreturn slat_c_panic(void);

/* Tables are freed by so many at a time when a VM ends. */
#define SLAT_DESTROY_TABLES	512

u64 slat_c_alloc(size_t bytes)
{
	void *va = alloc_pages_exact(bytes, GFP_KERNEL_ACCOUNT | __GFP_ZERO);

	if (!va)
		return 0;
	kvm_account_pgtable_pages(va, bytes >> PAGE_SHIFT);
	return __pa(va);
}

void slat_c_free(u64 pa, size_t bytes)
{
	void *va = __va(pa);

	kvm_account_pgtable_pages(va, -(int)(bytes >> PAGE_SHIFT));
	free_pages_exact(va, bytes);
}

u64 slat_c_take(struct kvm_mmu_memory_cache *mc)
{
	void *va;

	if (!mc || !mc->nobjs)
		return 0;
	va = kvm_mmu_memory_cache_alloc(mc);
	kvm_account_pgtable_pages(va, 1);
	return __pa(va);
}

void slat_c_flush_all(struct kvm_s2_mmu *mmu)
{
	kvm_call_hyp(__kvm_tlb_flush_vmid, mmu);
}

void slat_c_flush_range(struct kvm_s2_mmu *mmu, u64 ipa, u64 bytes)
{
	kvm_tlb_flush_vmid_range(mmu, ipa, bytes);
}

void slat_c_flush_ipa(struct kvm_s2_mmu *mmu, u64 ipa, int level)
{
	kvm_call_hyp(__kvm_tlb_flush_vmid_ipa, mmu, ipa, level);
}

void slat_c_flush_local(struct kvm_s2_mmu *mmu, u64 ipa, int level)
{
	kvm_call_hyp(__kvm_tlb_flush_vmid_ipa_nsh, mmu, ipa, level);
}

void slat_c_maintain(u64 pa, u64 bytes, bool instructions)
{
	__clean_dcache_guest_page(__va(pa), bytes);
	if (instructions)
		__invalidate_icache_guest_page(__va(pa), bytes);
}

void __noreturn slat_c_panic(void)
{
	panic("slat: the engine, or what calls it, is wrong");
}

struct slat_retired {
	struct rcu_head rcu;
	u64 words[2];
};

static u64 slat_offset(void)
{
	return (u64)__va(PHYS_OFFSET) - PHYS_OFFSET;
}

static void slat_free_retired(struct rcu_head *rcu)
{
	struct slat_retired *retired = container_of(rcu, struct slat_retired, rcu);

	slat_kvm_free_retired(slat_offset(), retired->words);
	kfree(retired);
}

/*
 * Frees tables that were unlinked, after a grace period. Without memory they
 * wait for the next call, or for the end of the VM.
 */
static void slat_retire(void *vm)
{
	struct slat_retired *retired;

	if (likely(!slat_kvm_has_retired(vm)))
		return;
	retired = kmalloc(sizeof(*retired), GFP_NOWAIT | __GFP_NOWARN);
	if (!retired)
		return;
	slat_kvm_take_retired(vm, retired->words);
	if (retired->words[0] | retired->words[1])
		call_rcu(&retired->rcu, slat_free_retired);
	else
		kfree(retired);
}

static void *slat_enter(struct kvm_pgtable *pgt, enum slat_op op)
{
	if (pgt->slat)
		atomic_long_inc(&slat_calls[op]);
	return pgt->slat;
}

/* Rights as the engine numbers them: this kernel may have others. Bits of nested guests stay. */
static u64 slat_prot(enum kvm_pgtable_prot prot)
{
	const u64 known = KVM_PGTABLE_PROT_RWX | KVM_PGTABLE_PROT_DEVICE |
			  KVM_PGTABLE_PROT_NORMAL_NC;
	u64 slat = prot & ~known;

	if ((prot & KVM_PGTABLE_PROT_X) == KVM_PGTABLE_PROT_X)
		slat |= BIT(0);
	if (prot & KVM_PGTABLE_PROT_W)
		slat |= BIT(1);
	if (prot & KVM_PGTABLE_PROT_R)
		slat |= BIT(2);
	if (prot & KVM_PGTABLE_PROT_DEVICE)
		slat |= BIT(3);
	if (prot & KVM_PGTABLE_PROT_NORMAL_NC)
		slat |= BIT(4);
	return slat;
}

static void slat_assert_write(struct kvm_pgtable *pgt)
{
	lockdep_assert_held_write(&kvm_s2_mmu_to_kvm(pgt->mmu)->mmu_lock);
}

static void slat_assert_read(struct kvm_pgtable *pgt)
{
	lockdep_assert_held(&kvm_s2_mmu_to_kvm(pgt->mmu)->mmu_lock);
}

/* Returns why a VM has to stay on C, or NULL. */
static const char *slat_why_not(struct kvm_s2_mmu *mmu)
{
	if (is_protected_kvm_enabled())
		return "pKVM manages stage 2 in its hypervisor";
	if (mmu != &mmu->arch->mmu)
		return "a nested guest's tables have bits of KVM's own";
	return NULL;
}

static int slat_init(struct kvm_pgtable *pgt, struct kvm_s2_mmu *mmu,
		     struct kvm_pgtable_mm_ops *mm_ops)
{
	u64 vtcr = mmu->vtcr, root;
	u64 mmfr0 = read_sanitised_ftr_reg(SYS_ID_AA64MMFR0_EL1);
	u32 parange = cpuid_feature_extract_unsigned_field(mmfr0, ID_AA64MMFR0_EL1_PARANGE_SHIFT);
	u32 bits = id_aa64mmfr0_parange_to_phys_shift(parange);
	bool wide = PAGE_SIZE == SZ_64K ? bits > 48 : kvm_lpa2_is_enabled();
	struct slat_config config = {
		.mmu = mmu,
		.offset = slat_offset(),
		.ipa_bits = VTCR_EL2_IPA(vtcr),
		.output_bits = min(bits, wide ? 52U : 48U),
		.wide = wide,
		.forced_write_back = cpus_have_final_cap(ARM64_HAS_STAGE2_FWB),
		.start_level = 4 - VTCR_EL2_LVLS(vtcr),
	};
	/* kmalloc() aligns a power of two to its size. */
	void *vm = kzalloc(roundup_pow_of_two(slat_kvm_bytes()), GFP_KERNEL_ACCOUNT);
	int ret;

	if (!vm)
		return -ENOMEM;
	ret = slat_kvm_init(vm, &config, &root);
	if (ret) {
		kfree(vm);
		return ret;
	}
	pgt->ia_bits = config.ipa_bits;
	pgt->start_level = config.start_level;
	pgt->pgd = (kvm_pteref_t)__va(root);
	pgt->mm_ops = mm_ops;
	pgt->mmu = mmu;
	pgt->flags = 0;
	pgt->force_pte_cb = NULL;
	pgt->slat = vm;
	atomic_long_inc(&slat_vms);
	return 0;
}

/* A VM stays on C. */
void slat_kvm_refused(const char *why)
{
	if (!READ_ONCE(slat))
		return;
	atomic_long_inc(&slat_refused);
	pr_info_ratelimited("kvm: slat: tables of %s (%d) are in C: %s\n", current->comm,
			    task_pid_nr(current), why);
}

int slat_kvm_pgtable_stage2_init(struct kvm_pgtable *pgt, struct kvm_s2_mmu *mmu,
				 struct kvm_pgtable_mm_ops *mm_ops)
{
	const char *why;
	int ret;

	if (!READ_ONCE(slat))
		return kvm_pgtable_stage2_init(pgt, mmu, mm_ops);
	why = slat_why_not(mmu);
	if (!why) {
		ret = slat_init(pgt, mmu, mm_ops);
		if (ret != -EINVAL)
			return ret;
		why = "the engine has no such geometry";
	}
	slat_kvm_refused(why);
	return kvm_pgtable_stage2_init(pgt, mmu, mm_ops);
}

/* No vCPU runs, and KVM has taken the tables away from notifiers. */
static void slat_destroy(struct kvm_pgtable *pgt)
{
	while (!slat_kvm_destroy_some(pgt->slat, SLAT_DESTROY_TABLES))
		cond_resched();
	slat_kvm_destroy(pgt->slat);
	kfree(pgt->slat);
	pgt->slat = NULL;
	pgt->pgd = NULL;
}

#if SLAT_KVM_PGT_FN
void slat_kvm_pgtable_stage2_destroy_range(struct kvm_pgtable *pgt, u64 addr, u64 size)
{
	if (!pgt->slat)
		kvm_pgtable_stage2_destroy_range(pgt, addr, size);
}

void slat_kvm_pgtable_stage2_destroy_pgd(struct kvm_pgtable *pgt)
{
	if (pgt->slat)
		slat_destroy(pgt);
	else
		kvm_pgtable_stage2_destroy_pgd(pgt);
}
#else
void slat_kvm_pgtable_stage2_destroy(struct kvm_pgtable *pgt)
{
	if (pgt->slat)
		slat_destroy(pgt);
	else
		kvm_pgtable_stage2_destroy(pgt);
}
#endif

int slat_kvm_pgtable_stage2_map(struct kvm_pgtable *pgt, u64 addr, u64 size, u64 phys,
				enum kvm_pgtable_prot prot, void *mc,
				enum kvm_pgtable_walk_flags flags)
{
	void *vm = slat_enter(pgt, MAP);
	int ret;

	if (!vm)
		return kvm_pgtable_stage2_map(pgt, addr, size, phys, prot, mc, flags);
	slat_assert_read(pgt);
	ret = slat_kvm_map(vm, ALIGN_DOWN(addr, PAGE_SIZE), PAGE_ALIGN(size),
			   ALIGN_DOWN(phys, PAGE_SIZE), slat_prot(prot), mc);
	slat_retire(vm);
	return ret;
}

int slat_kvm_pgtable_stage2_unmap(struct kvm_pgtable *pgt, u64 addr, u64 size)
{
	void *vm = slat_enter(pgt, UNMAP);
	int ret;

	if (!vm)
		return kvm_pgtable_stage2_unmap(pgt, addr, size);
	slat_assert_write(pgt);
	ret = slat_kvm_unmap(vm, addr, size);
	slat_retire(vm);
	return ret;
}

int slat_kvm_pgtable_stage2_wrprotect(struct kvm_pgtable *pgt, u64 addr, u64 size)
{
	void *vm = slat_enter(pgt, WRPROTECT);

	if (!vm)
		return kvm_pgtable_stage2_wrprotect(pgt, addr, size);
	slat_assert_write(pgt);
	return slat_kvm_wrprotect(vm, addr, size);
}

#if SLAT_KVM_PGT_FN
void slat_kvm_pgtable_stage2_mkyoung(struct kvm_pgtable *pgt, u64 addr,
				     enum kvm_pgtable_walk_flags flags)
{
	void *vm = slat_enter(pgt, MKYOUNG);

	if (!vm)
		return kvm_pgtable_stage2_mkyoung(pgt, addr, flags);
	slat_assert_read(pgt);
	slat_kvm_mkyoung(vm, addr);
}
#else
kvm_pte_t slat_kvm_pgtable_stage2_mkyoung(struct kvm_pgtable *pgt, u64 addr)
{
	void *vm = slat_enter(pgt, MKYOUNG);

	if (!vm)
		return kvm_pgtable_stage2_mkyoung(pgt, addr);
	slat_assert_read(pgt);
	return slat_kvm_mkyoung(vm, addr);
}
#endif

bool slat_kvm_pgtable_stage2_test_clear_young(struct kvm_pgtable *pgt, u64 addr,
					      u64 size, bool mkold)
{
	void *vm = slat_enter(pgt, AGE);
	bool young;

	if (!vm)
		return kvm_pgtable_stage2_test_clear_young(pgt, addr, size, mkold);
	/* With lockless-ageing the caller does not hold mmu_lock. */
	rcu_read_lock();
	young = slat_kvm_age(vm, addr, size, mkold);
	rcu_read_unlock();
	return young;
}

static int slat_relax(void *vm, u64 addr, enum kvm_pgtable_prot prot)
{
	return slat_kvm_relax(vm, addr, slat_prot(prot));
}

#if SLAT_KVM_PGT_FN
int slat_kvm_pgtable_stage2_relax_perms(struct kvm_pgtable *pgt, u64 addr,
					enum kvm_pgtable_prot prot,
					enum kvm_pgtable_walk_flags flags)
#else
int slat_kvm_pgtable_stage2_relax_perms(struct kvm_pgtable *pgt, u64 addr,
					enum kvm_pgtable_prot prot)
#endif
{
	void *vm = slat_enter(pgt, RELAX);

	if (!vm)
#if SLAT_KVM_PGT_FN
		return kvm_pgtable_stage2_relax_perms(pgt, addr, prot, flags);
#else
		return kvm_pgtable_stage2_relax_perms(pgt, addr, prot);
#endif
	slat_assert_read(pgt);
	return slat_relax(vm, addr, prot);
}

int slat_kvm_pgtable_stage2_flush(struct kvm_pgtable *pgt, u64 addr, u64 size)
{
	void *vm;

	if (cpus_have_final_cap(ARM64_HAS_STAGE2_FWB))
		return 0;
	vm = slat_enter(pgt, FLUSH);
	if (!vm)
		return kvm_pgtable_stage2_flush(pgt, addr, size);
	slat_assert_read(pgt);
	return slat_kvm_flush(vm, addr, size);
}

int slat_kvm_pgtable_stage2_split(struct kvm_pgtable *pgt, u64 addr, u64 size,
				  struct kvm_mmu_memory_cache *mc)
{
	void *vm = slat_enter(pgt, SPLIT);

	if (!vm)
		return kvm_pgtable_stage2_split(pgt, addr, size, mc);
	slat_assert_write(pgt);
	return slat_kvm_split(vm, addr, size, mc);
}

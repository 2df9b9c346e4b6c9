/*
 * What arch/arm64/kvm/hyp/pgtable.c and the callers around it expect of a kernel, for user space.
 *
 * Written from the interfaces that those files use and from the Arm manual. Hardware is
 * absent: invalidations, barriers for the walker of a CPU, cache maintenance and locks do nothing, or
 * are counted where SLAT_COUNT is set. What stays is the software's own work, atomics included.
 */
#ifndef SLAT_KERNEL_H
#define SLAT_KERNEL_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;
typedef int8_t s8;
typedef int32_t s32;
typedef long long s64;
typedef u64 phys_addr_t;
typedef u64 gfn_t;
typedef u64 gpa_t;
typedef u64 kvm_pfn_t;
typedef unsigned int gfp_t;

#define __rcu
#define __iomem
#undef __always_inline
#define __always_inline inline __attribute__((always_inline))
#define noinline __attribute__((noinline))
#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)
#define EXPORT_SYMBOL_GPL(x)
#define __stringify(x) #x

/* ---- bits ---- */

#define UL(x) (x##UL)
#define ULL(x) (x##ULL)
#define BIT(n) (1UL << (n))
#define BIT_ULL(n) (1ULL << (n))
#define GENMASK(high, low) ((~0UL >> (63 - (high))) & (~0UL << (low)))
#define GENMASK_ULL(high, low) ((u64)GENMASK(high, low))
#define SLAT_SHIFT_OF(mask) (__builtin_ctzll(mask))
#define FIELD_GET(mask, value) ((__typeof__(mask))(((value) & (mask)) >> SLAT_SHIFT_OF(mask)))
#define FIELD_PREP(mask, value) (((__typeof__(mask))(value) << SLAT_SHIFT_OF(mask)) & (mask))
#define ALIGN_DOWN(x, to) ((x) & ~((__typeof__(x))(to) - 1))
#define ALIGN(x, to) ALIGN_DOWN((x) + (__typeof__(x))(to) - 1, to)
#define IS_ALIGNED(x, to) (((x) & ((__typeof__(x))(to) - 1)) == 0)
#define DIV_ROUND_UP(n, by) (((n) + (by) - 1) / (by))
#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))
#define min(a, b) ((a) < (b) ? (a) : (b))
#define max(a, b) ((a) > (b) ? (a) : (b))
#define min_t(type, a, b) min((type)(a), (type)(b))
#define __ffs(word) ((unsigned long)__builtin_ctzl(word))
#define __fls(word) ((unsigned long)(63 - __builtin_clzl(word)))
#define container_of(pointer, type, member) \
	((type *)((char *)(pointer) - offsetof(type, member)))
#define IS_ENABLED(option) 0
#define BUILD_BUG_ON(condition) _Static_assert(!(condition), #condition)
#define ERR_PTR(error) ((void *)(long)(error))
#define PTR_ERR(pointer) ((long)(pointer))
#define IS_ERR(pointer) ((unsigned long)(pointer) >= (unsigned long)-4095)

/* ---- what may not happen: the helper ends, and says where ---- */

_Noreturn void slat_broken(const char *what, const char *file, int line);
#define WARN_ON(condition)                                                \
	({                                                                \
		bool slat_warned = !!(condition);                         \
		if (unlikely(slat_warned))                                \
			slat_broken("WARN_ON(" #condition ")", __FILE__, __LINE__); \
		slat_warned;                                              \
	})
#define WARN_ON_ONCE(condition) WARN_ON(condition)
#define WARN(condition, ...) WARN_ON(condition)
#define WARN_ONCE(condition, ...) WARN_ON(condition)
#define BUG_ON(condition) ((void)WARN_ON(condition))
#define VM_WARN_ON(condition) ((void)WARN_ON(condition))

/* ---- counts ---- */

struct slat_counts {
	u64 visits, loads, tlbis, barriers, pages, cache_calls, cache_bytes;
};
extern struct slat_counts slat_counts;
#ifdef SLAT_COUNT
#define SLAT_ADD(what, number) ((void)(slat_counts.what += (number)))
#else
#define SLAT_ADD(what, number) ((void)0)
#endif

/* ---- memory ordering ---- */

#define barrier() __asm__ volatile("" ::: "memory")
#define READ_ONCE(x)                                      \
	({                                                \
		SLAT_ADD(loads, 1);                       \
		*(const volatile __typeof__(x) *)&(x);    \
	})
#define WRITE_ONCE(x, value) (*(volatile __typeof__(x) *)&(x) = (value))
#define smp_store_release(pointer, value) __atomic_store_n(pointer, value, __ATOMIC_RELEASE)
#define smp_load_acquire(pointer) __atomic_load_n(pointer, __ATOMIC_ACQUIRE)
#define cmpxchg(pointer, old, new)                                                    \
	({                                                                            \
		__typeof__(*(pointer)) slat_old = (old);                              \
		__atomic_compare_exchange_n(pointer, &slat_old, new, false,           \
					    __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);      \
		slat_old;                                                             \
	})

/* RCU and locks: nobody else is there. A walker dereferences each entry it visits. */
#define rcu_read_lock() barrier()
#define rcu_read_unlock() barrier()
#define rcu_read_lock_held() true
#define rcu_dereference_raw(pointer) (pointer)
#define rcu_dereference_check(pointer, condition) \
	({                                        \
		(void)(condition);                \
		SLAT_ADD(visits, 1);              \
		(pointer);                        \
	})
#define lockdep_assert_held(lock) ((void)(lock))
#define lockdep_assert_held_write(lock) ((void)(lock))
#define lockdep_is_held(lock) true
#define write_lock(lock) barrier()
#define write_unlock(lock) barrier()
#define cond_resched() ((void)0)
#define cond_resched_rwlock_write(lock) ((void)(lock))
#define rwlock_needbreak(lock) false
#define need_resched() false
typedef struct { int unused; } rwlock_t;
struct rb_root { void *unused; };
struct rb_root_cached { void *unused[2]; };
struct rcu_head { void *unused[2]; };

/* ---- the CPU ---- */

#define dsb(kind) SLAT_ADD(barriers, 1)
#define isb() SLAT_ADD(barriers, 1)
#define kvm_call_hyp(function, ...) SLAT_ADD(tlbis, 1)
#define kvm_call_hyp_nvhe(function, ...) SLAT_ADD(tlbis, 1)
#define __tlbi_level(...) SLAT_ADD(tlbis, 1)
#define __tlbi_sync_s1ish_hyp() SLAT_ADD(barriers, 1)
#define __TLBI_VADDR(address, asid) (address)
#define TLBI_TTL_UNKNOWN INT8_MAX
#define MAX_TLBI_RANGE_PAGES (32UL << 16)

/* SLAT_FWB: whether stage 2 forces the memory type (FEAT_S2FWB). */
#define ARM64_HAS_STAGE2_FWB SLAT_FWB
#define ARM64_HAS_XNX 1
#define ARM64_KVM_HVHE 0
#define ARM64_WORKAROUND_AMPERE_AC03_CPU_38 0
#define ARM64_HAS_CACHE_IDC 1
#define ARM64_HAS_CACHE_DIC 1
#define cpus_have_final_cap(capability) (capability)
#define cpus_have_const_cap(capability) (capability)
#define system_supports_tlb_range() true
#define system_supports_lpa2() false
#define system_supports_bti() false
#define system_supports_bti_kernel() false
#define is_protected_kvm_enabled() false
#define KVM_PGT_FN(function) function

/* ID_AA64MMFR0_EL1.PARange, as in the manual. */
#define ID_AA64MMFR0_EL1_PARANGE_SHIFT 0
#define ID_AA64MMFR0_EL1_PARANGE_48 5
#define ID_AA64MMFR0_EL1_PARANGE_52 6
#define ID_AA64MMFR0_EL1_PARANGE_MAX ID_AA64MMFR0_EL1_PARANGE_48
#define cpuid_feature_extract_unsigned_field(register, shift) (((register) >> (shift)) & 0xf)
static inline u32 id_aa64mmfr0_parange_to_phys_shift(int parange)
{
	static const u8 bits[] = { 32, 36, 40, 42, 44, 48, 52 };

	return bits[parange < 7 ? parange : 5];
}
#define get_vmid_bits(mmfr1) 16

/* VTCR_EL2, as in the manual. Trees before 7.1 name fields by masks and shifts, later ones by masks. */
#define VTCR_EL2_RES1 (1ULL << 31)
#define VTCR_EL2_DS (1ULL << 32)
#define VTCR_EL2_HD (1ULL << 22)
#define VTCR_EL2_HA (1ULL << 21)
#define VTCR_EL2_VS (1ULL << 19)
#define VTCR_EL2_VS_8BIT 0
#define VTCR_EL2_VS_16BIT VTCR_EL2_VS
#define VTCR_EL2_PS_SHIFT 16
#define VTCR_EL2_PS GENMASK_ULL(18, 16)
#define VTCR_EL2_PS_MASK VTCR_EL2_PS
#define VTCR_EL2_SL0_SHIFT 6
#define VTCR_EL2_SL0 GENMASK_ULL(7, 6)
#define VTCR_EL2_SL0_MASK VTCR_EL2_SL0
#define VTCR_EL2_T0SZ_MASK GENMASK_ULL(5, 0)
#if SLAT_T0SZ_IS_MASK
#define VTCR_EL2_T0SZ VTCR_EL2_T0SZ_MASK
#else
#define VTCR_EL2_T0SZ(bits) (64ULL - (bits))
#endif
#define SLAT_INNER_WRITE_BACK (3ULL << 12 | 1ULL << 10 | 1ULL << 8)
#if PAGE_SHIFT == 12
#define CONFIG_ARM64_4K_PAGES 1
#define SLAT_TG0 0ULL
#define SLAT_SL0_OF_0 2
#elif PAGE_SHIFT == 14
#define CONFIG_ARM64_16K_PAGES 1
#define SLAT_TG0 (2ULL << 14)
#define SLAT_SL0_OF_0 3
#else
#define CONFIG_ARM64_64K_PAGES 1
#define SLAT_TG0 (1ULL << 14)
#define SLAT_SL0_OF_0 3
#endif
#define CONFIG_ARM64_HW_AFDBM 1
#define VTCR_EL2_FLAGS (VTCR_EL2_RES1 | SLAT_INNER_WRITE_BACK | SLAT_TG0)
/*
 * SL0 says the level at which hardware starts, by what its 0 means less the level: with the 4K granule
 * 0 is level 2, with the others level 3. The last level is 3.
 */
#define VTCR_EL2_TGRAN_SL0_BASE SLAT_SL0_OF_0
#define SLAT_SL0(start_level) ((u64)(SLAT_SL0_OF_0 - (start_level)) << VTCR_EL2_SL0_SHIFT)
#define VTCR_EL2_LVLS_TO_SL0(levels) SLAT_SL0(4 - (int)(levels))
#define VTCR_EL2_LVLS(vtcr) (4 - (SLAT_SL0_OF_0 - (int)FIELD_GET(VTCR_EL2_SL0, vtcr)))
#define VTCR_EL2_IPA(vtcr) (64 - ((vtcr) & VTCR_EL2_T0SZ_MASK))

/* ---- translation tables ---- */

#define PAGE_SIZE (1UL << PAGE_SHIFT)
#define PAGE_MASK (~(PAGE_SIZE - 1))
#define PAGE_ALIGN(address) ALIGN(address, PAGE_SIZE)
#define PTDESC_ORDER 3
#define PTRS_PER_PTE (1 << (PAGE_SHIFT - 3))
/* Levels resolve PAGE_SHIFT - 3 bits each; level 3 begins above the page's own bits. */
#define ARM64_HW_PGTABLE_LEVELS(bits) (((bits) - 4) / (PAGE_SHIFT - 3))
#define ARM64_HW_PGTABLE_LEVEL_SHIFT(level) ((PAGE_SHIFT - 3) * (4 - (level)) + 3)
#define PMD_SHIFT ARM64_HW_PGTABLE_LEVEL_SHIFT(2)
#define PUD_SHIFT ARM64_HW_PGTABLE_LEVEL_SHIFT(1)
#define PMD_SIZE (1UL << PMD_SHIFT)
#define PUD_SIZE (1UL << PUD_SHIFT)
#define __phys_to_pfn(address) ((address) >> PAGE_SHIFT)

/* Memory types: stage 1's indices, stage 2's MemAttr without and with FEAT_S2FWB. */
#define MT_NORMAL 0
#define MT_NORMAL_NC 2
#define MT_DEVICE_nGnRE 4
#define MT_S2_NORMAL 0xf
#define MT_S2_NORMAL_NC 5
#define MT_S2_DEVICE_nGnRE 1
#define MT_S2_AS_S1 MT_S2_NORMAL
#define MT_S2_FWB_NORMAL 6
#define MT_S2_FWB_NORMAL_NC 5
#define MT_S2_FWB_DEVICE_nGnRE 1
#define MT_S2_FWB_AS_S1 7
#define PTE_S2_MEMATTR(type) ((u64)(type) << 2)
/* Some trees give a second argument, which is the same condition. */
#define PAGE_S2_MEMATTR(type, ...) PTE_S2_MEMATTR(SLAT_FWB ? MT_S2_FWB_##type : MT_S2_##type)

/* ---- allocation ---- */

#define GFP_KERNEL_ACCOUNT 1u
#define GFP_ATOMIC 2u
#define __GFP_ACCOUNT 4u
#define __GFP_ZERO 8u
struct kmem_cache;
#define kmem_cache_alloc(cache, flags) ((void)(cache), NULL)
#define kmem_cache_free(cache, object) ((void)(cache), (void)(object))
#define kvmalloc_array(count, size, flags) calloc(count, size)
#define kvfree(pointer) free(pointer)
unsigned long __get_free_page(gfp_t flags);
void free_page(unsigned long address);
static inline void memset64(u64 *words, u64 value, size_t count)
{
	while (count--)
		*words++ = value;
}

/* ---- KVM ---- */

#define KVM_ARCH_NR_OBJS_PER_MEMORY_CACHE 40
struct kvm_mmu_memory_cache {
	int nobjs;
	gfp_t gfp_zero;
	gfp_t gfp_custom;
	u64 init_value;
	struct kmem_cache *kmem_cache;
	int capacity;
	void **objects;
};
int kvm_mmu_topup_memory_cache(struct kvm_mmu_memory_cache *mc, int min);
int __kvm_mmu_topup_memory_cache(struct kvm_mmu_memory_cache *mc, int capacity, int min);
int kvm_mmu_memory_cache_nr_free_objects(struct kvm_mmu_memory_cache *mc);
void kvm_mmu_free_memory_cache(struct kvm_mmu_memory_cache *mc);
void *kvm_mmu_memory_cache_alloc(struct kvm_mmu_memory_cache *mc);

struct kvm_pgtable;
struct kvm_arch;
struct kvm_s2_mmu {
	u64 vtcr;
	struct kvm_pgtable *pgt;
	struct kvm_mmu_memory_cache split_page_cache;
	u64 split_page_chunk_size;
	struct kvm_arch *arch;
};
struct kvm_arch {
	struct kvm_s2_mmu mmu;
	u64 vtcr;
};
struct kvm {
	rwlock_t mmu_lock;
	struct kvm_arch arch;
	bool manual_protect_and_init_set;
};
struct kvm_memory_slot {
	gfn_t base_gfn;
	unsigned long npages;
};
#define kvm_s2_mmu_to_kvm(mmu) container_of((mmu)->arch, struct kvm, arch)
#define kvm_dirty_log_manual_protect_and_init_set(kvm) ((kvm)->manual_protect_and_init_set)
#define kvm_nested_s2_wp(kvm) ((void)(kvm))

#endif

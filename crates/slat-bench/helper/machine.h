/* Table memory, and the rest of a machine around the tree's code. */
#ifndef SLAT_MACHINE_H
#define SLAT_MACHINE_H

#include <asm/kvm_pgtable.h>

/* Maps and touches so many bytes for tables; false if the host refuses. */
bool machine_begin(u64 bytes);
/* Takes all table memory back, whatever stands in it. */
void machine_reset(void);
/* Brings the first bytes of the memory into the caches, or drives them out. */
void machine_warm(u64 bytes);
void machine_cool(u64 bytes);
/* A table by its physical address; NULL outside of the memory. */
u64 *machine_table(u64 phys);
/* Bytes of table memory that are handed out. */
u64 machine_used(void);
/* Bytes of all of this program's memory that huge pages back. */
u64 machine_huge(void);
extern struct kvm_pgtable_mm_ops machine_mm_ops;

#endif

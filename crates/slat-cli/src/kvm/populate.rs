//! The scenario `populate`: vCPUs touch memory of a guest for the first time.

use super::options::{GuestArgs, RunArgs};
use super::repeat::Repeatable;
use super::runs::{Guest, asked};
use super::tables::renderer;
use super::values::KvmBacking;
use crate::needs::GUEST;
use clap::Args;
use slat_kvm::guest::Shape;
use slat_kvm::scenario::populate;
use slat_kvm::{Error, Setting};
use slat_lab::cli::count;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::size::Size;

const EXAMPLES: &str = "\
Examples:
  slat bench populate
      first touches of 1 and 2 vCPUs on 4k pages and on transparent huge ones
  slat bench populate --backing 4k,2m,shmem --vcpus 1,4
      real memory, by KVM's faults
  slat bench populate --vcpus 1,2,4,8 --backing 4k --overlap
      all vCPUs touch the same memory
  slat bench populate --backing 4k --prealloc
      what KVM's faults cost a VMM that allocates all memory first";

/// Options of `slat bench populate`.
#[derive(Clone, Debug, Args)]
pub struct PopulateArgs {
    /// Memory of the guest, which the vCPUs share evenly
    #[arg(long, short = 'b', value_name = "SIZE", default_value = "256M")]
    pub memory: Size,

    /// vCPUs
    #[arg(long, short = 'v', value_name = "N,...", value_delimiter = ',', default_value = "1,2")]
    #[arg(value_parser = count::vcpus())]
    pub vcpus: Vec<u32>,

    /// What backs the guest's memory: 4k, 2m (transparent huge pages), hugetlb-SIZE (of the host's
    /// pool of that size: hugetlb-2m), shmem, memfd (mapped shared, as VMMs do that give the memory
    /// to other processes) or memfd-hugetlb-SIZE
    #[arg(long, short = 's', value_name = "BACKING,...", value_delimiter = ',')]
    #[arg(default_value = "4k,2m")]
    pub backing: Vec<KvmBacking>,

    /// All vCPUs touch all of the memory, in the same order, not each its own share
    #[arg(long)]
    pub overlap: bool,

    /// The host has all of the memory before the vCPUs touch it, as with prealloc=on of QEMU: what
    /// is left is KVM's part
    #[arg(long)]
    pub prealloc: bool,

    /// Options of the measurement.
    #[command(flatten)]
    pub run: RunArgs,
}

/// The scenario.
pub struct Populate;

impl Scenario for Populate {
    const NAME: &'static str = populate::RESULTS.name;
    const ABOUT: &'static str = "Touch memory for the first time";
    const EXAMPLES: &'static str = EXAMPLES;
    const NEEDS: &'static [&'static [&'static str]] = GUEST;
    const RENDERER: Renderer = renderer!(populate::RESULTS);
    type Settings = PopulateArgs;

    fn run(args: &PopulateArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let mut cases = Vec::new();
        for (&backing, &vcpus) in
            args.backing.iter().flat_map(|backing| args.vcpus.iter().map(move |it| (backing, it)))
        {
            let (memory, run) = (args.memory, args.run.clone());
            let mut guest = GuestArgs { memory, vcpus, backing, run };
            guest.shrink();
            let run = |shape: &Shape, setting: Setting<'_>| {
                populate::run(&Shape { prealloc: args.prealloc, ..shape.clone() }, setting)
            };
            let asked = asked(&guest, args.overlap);
            let mut case = Guest::of(Self::NAME, &asked, &populate::OUTCOME, run)?;
            if args.prealloc {
                case = case.with("prealloc", true);
            }
            cases.push((guest.memory, vcpus, case));
        }
        session.start(Self::NAME, cases.iter().map(|(.., case)| case.steps(2)).sum());
        let several = cases.len() > 1;
        let mut results = Vec::new();
        for (memory, vcpus, case) in cases {
            if session.interrupted() {
                break;
            }
            session.announce(memory.bytes(), vcpus as usize, 0);
            let name = case.name();
            match case.measure(session) {
                Ok(measured) => results.extend(measured),
                // A host that lacks one of several backings may have the others.
                Err(error)
                    if several && error.downcast_ref().is_some_and(Error::is_missing_feature) =>
                {
                    session.skip(name, format!("{error:#}"));
                }
                Err(error) => return Err(error),
            }
        }
        session.finish();
        Ok(results)
    }
}

//! Lets aya copy the map types to and from the kernel.

use crate::{
    Affinity, AffinityKey, EndKey, Health, HealthConfig, HealthEvent, HealthKey, Heartbeat,
    LeftAlone, LoadKey, Node, Pair, ProbeKey, ServiceCounts, ServiceEntry, ServiceKey, ServiceName,
    Slot, SlotKey, SocketKey, SpliceConfig, SpliceEvent, Task, UdpClient,
};

macro_rules! pod {
    ($($type:ty),+ $(,)?) => {
        $(
            // SAFETY: the type is repr(C), Copy, made of integers and arrays of
            // them, and has no padding (asserted beside its definition).
            unsafe impl aya::Pod for $type {}
        )+
    };
}

pod!(
    Affinity,
    AffinityKey,
    EndKey,
    Health,
    HealthConfig,
    HealthEvent,
    HealthKey,
    Heartbeat,
    LeftAlone,
    LoadKey,
    Node,
    Pair,
    ProbeKey,
    ServiceCounts,
    ServiceEntry,
    ServiceKey,
    ServiceName,
    Slot,
    SlotKey,
    SocketKey,
    SpliceConfig,
    SpliceEvent,
    Task,
    UdpClient,
);

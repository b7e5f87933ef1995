//! Lets aya copy the map types to and from the kernel.

use crate::{
    Affinity, AffinityKey, Heartbeat, LeftAlone, LoadKey, Node, ServiceEntry, ServiceKey,
    ServiceName, Slot, SlotKey, SocketEntry, SocketKey, UdpClient,
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
    Heartbeat,
    LeftAlone,
    LoadKey,
    Node,
    ServiceEntry,
    ServiceKey,
    ServiceName,
    Slot,
    SlotKey,
    SocketEntry,
    SocketKey,
    UdpClient,
);

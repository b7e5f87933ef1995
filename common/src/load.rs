//! How many connections each endpoint of this node holds.

/// An endpoint whose connections are counted. The value is their number.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct LoadKey {
    address: [u8; 16],
    port: [u8; 2],
    reserved: [u8; 2],
}

const _: () = assert!(size_of::<LoadKey>() == 20 && align_of::<LoadKey>() == 4);

impl LoadKey {
    /// The port is in network byte order.
    #[inline(always)]
    pub const fn new(address: [u8; 16], port: [u8; 2]) -> Self {
        Self {
            address,
            port,
            reserved: [0; 2],
        }
    }

    /// The endpoint's address.
    pub const fn address(&self) -> &[u8; 16] {
        &self.address
    }

    /// The endpoint's port, network byte order.
    pub const fn port(&self) -> [u8; 2] {
        self.port
    }
}

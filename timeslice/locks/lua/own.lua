--[[
A coordinator takes or keeps a group, and does the group's housekeeping. Its own deadline is the lease.
ARGV  1 floor  2 coordinator  3 ttl_ms
Reply mine epoch counter | other owner ms_left (owner '': no served group)
Events OwnerChanged, and what advance and reap emit
--]]
-- @include group waiters residency lease advance
local coordinator, ttl_ms = ARGV[2], tonumber(ARGV[3])

begin(true)
if S.mode ~= 'served' then
  return { 'other', '', 0 } -- gone or lock-only: nothing to own, and nothing to bring back to life
end
settle_clock() -- first: neither an outage nor a clock step takes a group from its owner
if S.owner ~= '' and S.owner ~= coordinator and S.owner_deadline_ms >= now then
  save()
  return { 'other', S.owner, S.owner_deadline_ms - now }
end
if S.owner ~= coordinator then
  set('owner', coordinator)
  set('owner_epoch', draw())
  emit('OwnerChanged', 'owner', coordinator, 'epoch', digits(S.owner_epoch))
end
set('owner_deadline_ms', now + ttl_ms)
reap()
advance()
save()
return { 'mine', S.owner_epoch, S.counter }

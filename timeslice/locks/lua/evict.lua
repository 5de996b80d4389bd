--[[
Moves a job's device state to host memory now, by an operator's order. The order is dropped if it fails once.
ARGV  1 floor  2 job  3 by whom  4 why, or ''  5 '1': by force
Reply ok | out residency (there is nothing to move; a job with registered processes is asked for that, unless it is
      suspended) | refused reason
Events EvictionOrdered, and what advance and reap emit
--]]
-- @include group waiters gangs residency lease advance
local job, force = ARGV[2], ARGV[5] == '1'

-- Nobody granted it and no agent told of it, and yet its processes may have loaded: only they can tell.
local function is_untold()
  if S.mode ~= 'served' then
    return false
  end
  for _, field in ipairs(redis.call('HKEYS', targets_key)) do
    if string.sub(field, 1, #job + 1) == job .. '/' then
      return true
    end
  end
  return false
end

begin(true)
settle_clock()
reap()
local where = residency_of_jobs()[job] or 'absent'
local in_doubt = S.evict == job
local undriven = (S.owner == '' or S.owner_deadline_ms < now) and NO_COORDINATOR .. '; start one: timeslice coordinator'
local refusal
if S.lease_id ~= '' and S.job == job then
  refusal = 'it holds the group; take that away first: timeslice revoke'
elseif OUT[where] and not in_doubt and (where == 'suspended' or not is_untold()) then
  advance()
  save()
  return { 'out', where }
elseif S.evict_how ~= '' then
  refusal = undriven -- else asked again, or another order clears the device already
elseif S.lease_id ~= '' then
  refusal = 'job ' .. S.job .. ' holds the group; wait until it yields, or take that away: timeslice revoke'
elseif S.swap_id ~= 0 then
  refusal = 'a swap' .. (S.swap_job == '' and '' or ' for job ' .. S.swap_job) .. ' is under way; wait until it is over'
else
  refusal = clearing_obstacle() or undriven
  if not refusal then
    set('evict_how', S.evict ~= '' and 'must' or 'once') -- a job in doubt must leave, whoever is meant
    set('evict', S.evict == '' and job or S.evict)
    set('evict_reason', '')
    set('evict_until_ms', 0)
    set('force', force and '1' or '')
    emit('EvictionOrdered', 'job', job, 'by', ARGV[3], 'reason', ARGV[4], 'force', ARGV[5])
  end
end
advance()
save()
if refusal then
  return { 'refused', refusal }
end
return { 'ok' }
